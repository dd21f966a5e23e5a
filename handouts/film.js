// Films: of the frames that stand side by side one is shown, with buttons, a slider and keys.
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
