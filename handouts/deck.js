// One slide is shown at a time. Arrow keys, Space and Page Up and Down move, what waits comes one
// by one, and N shows the notes. A slide with too much for the screen becomes smaller, by a quarter at most;
// what is still below is scrolled to before the next slide. Without a script all slides stand under each other. (No dollar signs: pandoc.)
const slides = [...document.querySelectorAll(".slide")], waits = (slide) => [...slide.querySelectorAll(".fragment")];
const bar = document.body.appendChild(document.createElement("nav"));
const button = (text, ariaLabel, onclick) => {
  bar.append(Object.assign(document.createElement("button"), { type: "button", textContent: text, ariaLabel, onclick }));
};
let at = 0, seen = 0;

function show(slide, fragments = 0) {
  at = Math.max(0, Math.min(slide, slides.length - 1));
  seen = fragments;
  slides.forEach((each, i) => each.classList.toggle("now", i === at));
  waits(slides[at]).forEach((each, i) => each.classList.toggle("seen", i < seen));
  fit(slides[at]);
  slides[at].scrollTop = 0;
  waits(slides[at])[seen - 1]?.scrollIntoView({ block: "nearest" });
  tell();
  said.textContent = " " + (at + 1) + " / " + slides.length + " ";
  history.replaceState(null, "", "#" + (at + 1));
}
const own = (slide) => [...slide.children].filter((each) => !each.matches(".notes"));
const below = (slide) => own(slide).some((each) => each.getBoundingClientRect().bottom > innerHeight + 2);
const tell = () => bar.classList.toggle("more", below(slides[at]));
function fit(slide) {
  const few = !own(slide).some((each) => each.matches("pre, img") || each.querySelector("pre, img, table, li"));
  const telling = document.body.classList.contains("telling");
  document.body.classList.remove("telling"); // notes take no part
  slide.classList.toggle("few", few && !telling);
  for (const size of [...(few ? [1.4, 1.2] : []), 1, 0.95, 0.9, 0.85, 0.8, 0.75]) {
    slide.style.setProperty("--fit", size);
    if (slide.scrollHeight <= slide.clientHeight) break;
  }
  document.body.classList.toggle("telling", telling);
}
function on() {
  if (seen < waits(slides[at]).length) show(at, seen + 1);
  else if (below(slides[at])) slides[at].scrollBy(0, innerHeight * 0.7);
  else if (at < slides.length - 1) show(at + 1);
}
function back() {
  if (seen) show(at, seen - 1);
  else if (at) show(at - 1, waits(slides[at - 1]).length);
}

function notes() {
  document.body.classList.toggle("telling");
  fit(slides[at]);
  tell();
}

button("\u25c0", "back", back);
bar.append(Object.assign(document.createElement("span"), { className: "below", textContent: "\u25bc more below " }));
const said = bar.appendChild(document.createElement("span"));
button("\u25b6", "on", on);
button("notes", "notes for the speaker, on or off", notes);
const keys = { ArrowRight: on, " ": on, PageDown: on, ArrowLeft: back, PageUp: back,
  Home: () => show(0), End: () => show(slides.length - 1), n: notes };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || !keys[event.key]) return;
  if (event.key === " " && event.target.closest?.("button, a, summary")) return;
  keys[event.key]();
  event.preventDefault();
});
slides.forEach((slide) => slide.addEventListener("scroll", tell, { passive: true }));
addEventListener("resize", () => { fit(slides[at]); tell(); });
addEventListener("hashchange", () => show(parseInt(location.hash.slice(1)) - 1 || 0));
document.body.classList.add("live");
show(parseInt(location.hash.slice(1)) - 1 || 0);
