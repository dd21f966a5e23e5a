// Sliders over a picture. `bars` makes them, here and for explore.js; `open` shows the frames
// that Python drew, one for each setting, from parts that each stand once.
const sliders = {
  bars(place, rows, what, show) {
    const at = rows.map((row) => row.at), make = (kind, parent, more) => {
      const made = Object.assign(document.createElement(kind), more);
      parent.append(made);
      return made;
    };
    place.replaceChildren();
    rows.forEach((row, i) => {
      const bar = make("label", place, { className: "bar" });
      make("span", bar, { textContent: row.says });
      const input = make("input", bar, {
        type: "range", min: 0, max: row.labels.length - 1, value: row.at,
        oninput: () => { at[i] = +input.value; tell(); draw(); },
      });
      const said = make("output", bar);
      const tell = () => {
        said.textContent = row.labels[at[i]];
        input.setAttribute("aria-valuetext", said.textContent);
      };
      tell();
    });
    const screen = make("div", place, { className: "screen", tabIndex: 0, ariaLabel: what });
    screen.setAttribute("role", "group");
    const words = make("p", place, { ariaLive: "polite" });
    const draw = () => show(at, screen, words);
    draw();
  },
  frame(data, at) {
    const place = data.sliders.reduce((n, row, i) => n * row.labels.length + at[i], 0);
    const [says, parts] = data.frames[place];
    return { says, svg: parts.map((part) => data.parts[part]).join("") };
  },
  open(place) {
    const data = JSON.parse(place.dataset.frames), picture = new Image();
    this.bars(place, data.sliders, "picture", (at, screen, words) => {
      const { says, svg } = this.frame(data, at);
      picture.src = "data:image/svg+xml," + encodeURIComponent(svg);
      const [wide, ...sizes] = [/<svg[^>]* width=['"]([\d.]+)/g, /font-size=['"]([\d.]+)/g]
        .flatMap((what) => [...svg.matchAll(what)].map((found) => +found[1]));
      picture.style.setProperty("--least", 9 * wide / Math.min(...sizes) + "px"); // its words are read
      picture.alt = words.textContent = says;
      screen.replaceChildren(picture);
    });
  },
};
if (typeof document !== "undefined") document.querySelectorAll("[data-frames]").forEach((place) => sliders.open(place));
