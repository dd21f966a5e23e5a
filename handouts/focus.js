// The keyboard reaches a code block, a table or a picture only where it has more than is seen.
const widths = new ResizeObserver((seen) => {
  for (const { target } of seen) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
});
for (const place of document.querySelectorAll('main [tabindex="0"]:not(.screen)')) widths.observe(place);
