// What every page has: code to copy, the section in sight, pictures that move when asked to.
// (No dollar signs: pandoc.)
const NUMBER = /^ *\d+ {2}/; // of a line in its file
const bare = (text) => {
  const lines = text.trimEnd().split("\n");
  const numbered = lines.every((line) => !line.trim() || NUMBER.test(line));
  return lines.map((line) => numbered ? line.replace(NUMBER, "") : line).join("\n") + "\n";
};
for (const code of document.querySelectorAll("div.sourceCode, .text > pre:not([class])")) {
  const place = document.createElement("div"), button = document.createElement("button");
  place.className = "copies";
  Object.assign(button, { type: "button", textContent: "copy", ariaLive: "polite" });
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(bare(code.textContent));
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  };
  code.replaceWith(place);
  place.append(code, button);
}

const contents = new Map([...document.querySelectorAll("nav.toc a")].map((a) => [a.hash.slice(1), a]));
if (contents.size) {
  const heads = [...document.querySelectorAll(".text > :is(h2, h3)[id]")].filter((h) => contents.has(h.id));
  const fold = document.querySelector("nav.toc details"), title = fold.querySelector("summary"), says = title.textContent;
  let now = null;
  const mark = () => {
    const next = heads.findLast((head) => head.getBoundingClientRect().top < innerHeight / 3);
    if (next === now) return;
    contents.get(now?.id)?.removeAttribute("aria-current");
    now = next;
    contents.get(now?.id)?.setAttribute("aria-current", "true");
    title.textContent = now ? contents.get(now.id).textContent : says;
  };
  if (fold.parentNode.matches(".stays")) {
    const close = (event) => { if (!fold.contains(event.target) || event.target.closest("a")) fold.open = false; };
    addEventListener("click", close);
  }
  addEventListener("scroll", mark, { passive: true });
  mark();
}

// The file says that nothing in it moves; the button takes that out.
const still = " media='not all'";
for (const group of document.querySelectorAll("main .picture:has(> img.moves)")) {
  const images = [...group.querySelectorAll("img.moves")], button = document.createElement("button");
  const stopped = images.map((image) => image.src), seconds = 1e3 * Math.max(...images.map((i) => +i.dataset.seconds || 0));
  const moving = stopped.map((src) => {
    const [head, data] = src.split(",");
    return head + "," + btoa(atob(data).replace(still, ""));
  });
  let timer = 0;
  const rest = () => {
    clearTimeout(timer);
    timer = 0;
    button.textContent = "\u25b6 play";
    images.forEach((image, i) => { image.src = stopped[i]; });
  };
  button.type = "button";
  button.onclick = () => {
    if (timer) return rest();
    button.textContent = "stop";
    images.forEach((image, i) => { image.src = moving[i]; });
    timer = setTimeout(rest, seconds);
  };
  for (const image of images) image.onclick = button.onclick;
  const bar = document.createElement("div");
  bar.className = "moving";
  group.after(bar);
  bar.append(button);
  rest();
}

// Paper has no folds: where the style sheet alone doesn't open them, they are open meanwhile.
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("main .text details:not([open])")];
  for (const fold of unfolded) fold.open = true;
});
addEventListener("afterprint", () => {
  for (const fold of unfolded) fold.open = false;
  unfolded = [];
});
