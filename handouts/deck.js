// One slide is shown at a time. Arrow keys, Space and Page Up and Down move, what waits comes one
// by one, and N shows the notes. Without a script all slides stand under each other. (No dollar signs: pandoc.)
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
  said.textContent = " " + (at + 1) + " / " + slides.length + " ";
  history.replaceState(null, "", "#" + (at + 1));
}
function on() {
  if (seen < waits(slides[at]).length) show(at, seen + 1);
  else if (at < slides.length - 1) show(at + 1);
}
function back() {
  if (seen) show(at, seen - 1);
  else if (at) show(at - 1, waits(slides[at - 1]).length);
}

button("\u25c0", "back", back);
const said = bar.appendChild(document.createElement("span"));
button("\u25b6", "on", on);
button("notes", "notes for the speaker, on or off", () => document.body.classList.toggle("telling"));
const keys = { ArrowRight: on, " ": on, PageDown: on, ArrowLeft: back, PageUp: back,
  Home: () => show(0), End: () => show(slides.length - 1), n: () => document.body.classList.toggle("telling") };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || !keys[event.key]) return;
  if (event.key === " " && event.target.closest?.("button, a, summary")) return;
  keys[event.key]();
  event.preventDefault();
});
addEventListener("hashchange", () => show(parseInt(location.hash.slice(1)) - 1 || 0));
document.body.classList.add("live");
show(parseInt(location.hash.slice(1)) - 1 || 0);
