// Films: of the frames that stand side by side one is shown, with buttons, a slider and keys.
// One step on, a small square travels along each of the new arrows, unless motion is unwanted.
const roads = (svg) => { // the points that each arrow passes: it ends with the line before a head
  const found = [];
  let before = []; // the lines before this one, in its colour
  for (const part of svg.querySelectorAll("line, rect")) {
    const [colour, ...ends] = ["stroke", "x1", "y1", "x2", "y2"].map((name) => part.getAttribute(name));
    if (part.tagName === "rect") {
      if (part.getAttribute("fill").length > 7) found.length = 0; // a veil: those below are old
      continue;
    }
    const [x1, y1, x2, y2] = ends.map(Number), line = { colour, from: [x1, y1], to: [x2, y2] };
    if (before.length && before[0].colour !== colour) before = [];
    if (part.nextElementSibling?.tagName !== "polygon") { before.push(line); continue; }
    const stubs = before.filter(({ from, to }) => to[0] === x1 && from[1] === to[1]); // from other boxes, to one line
    let points = [line.from, line.to];
    for (const { from, to } of [...before].reverse()) {
      if (to[0] !== points[0][0] || to[1] !== points[0][1]) break;
      points = [from, ...points];
    }
    const ways = points.length > 2 || !stubs.length ? [points] : stubs.map(({ from, to }) => [from, to, ...points]);
    found.push(...ways.map((way) => ({ colour, way })));
  }
  return found;
};
const travel = (img) => {
  if (!img?.src.startsWith("data:image/svg") || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const bytes = Uint8Array.from(atob(img.src.split(",")[1]), (letter) => letter.charCodeAt(0));
  const svg = new DOMParser().parseFromString(new TextDecoder().decode(bytes), "image/svg+xml").documentElement;
  const over = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  over.setAttribute("viewBox", svg.getAttribute("viewBox"));
  over.setAttribute("aria-hidden", "true");
  for (const { colour, way } of roads(svg)) {
    const square = document.createElementNS(over.namespaceURI, "rect");
    Object.entries({ x: -7, y: -7, width: 14, height: 14, rx: 3, fill: colour, stroke: "#fff" })
      .forEach(([name, value]) => square.setAttribute(name, value));
    const places = way.map(([x, y]) => ({ transform: `translate(${x}px, ${y}px)` }));
    square.animate(places, { duration: 600, easing: "ease-in-out", fill: "both" });
    over.append(square);
  }
  if (!over.childElementCount) return;
  img.parentElement.style.position = "relative";
  requestAnimationFrame(() => { // the frame is shown by now
    Object.assign(over.style, {
      position: "absolute", pointerEvents: "none", filter: getComputedStyle(img).filter,
      left: img.offsetLeft + "px", top: img.offsetTop + "px", width: img.clientWidth + "px", height: img.clientHeight + "px",
    });
    img.parentElement.append(over);
    setTimeout(() => over.remove(), 700);
  });
};
for (const film of document.querySelectorAll(".film")) {
  const steps = [...film.querySelectorAll("figure")];
  const make = (kind, words, parent, more) => {
    const made = Object.assign(document.createElement(kind), { textContent: words, ...more });
    parent.append(made);
    return made;
  };
  const names = steps.map((figure) => figure.querySelector("figcaption").textContent.trim());
  const [unit, last] = names.at(-1).split(" ");
  const bar = make("div", "", film, { className: "bar" });
  let at = 0, playing = 0;
  const stop = () => { clearInterval(playing); playing = 0; play.textContent = "\u25b6 play"; };
  const show = (step) => {
    if (step === at + 1 && steps[step]) travel(steps[step].querySelector("img"));
    at = Math.max(0, Math.min(step, steps.length - 1));
    steps.forEach((figure, i) => { figure.style.display = i === at ? "block" : "none"; });
    slider.value = at;
    said.textContent = names[at] + " of " + last;
    slider.setAttribute("aria-valuetext", said.textContent);
  };
  const go = (step) => { stop(); show(step); };
  make("button", "\u25c0", bar, { ariaLabel: "one " + unit + " back", title: "one " + unit + " back", onclick: () => go(at - 1) });
  const slider = make("input", "", bar, {
    type: "range", min: 0, max: steps.length - 1, ariaLabel: unit, oninput: () => go(+slider.value),
  });
  make("button", "\u25b6", bar, { ariaLabel: "one " + unit + " on", title: "one " + unit + " on", onclick: () => go(at + 1) });
  const play = make("button", "", bar, { onclick: () => {
    if (playing) return stop();
    if (at === steps.length - 1) show(0);
    play.textContent = "stop";
    playing = setInterval(() => { show(at + 1); if (at === steps.length - 1) stop(); }, 1500);
  } });
  const said = make("span", "", bar, { ariaLive: "polite" });
  const screen = make("div", "", film, { className: "screen", tabIndex: 0, ariaLabel: "film" });
  screen.setAttribute("role", "group");
  screen.onkeydown = (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) { go(at + way); event.preventDefault(); }
  };
  screen.append(...steps);
  film.replaceChildren(bar, screen);
  stop();
  show(0);
}
