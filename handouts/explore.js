// A priced step under sliders. `replay` does what mgpu_tutorial/instruments/price/replay.py does for
// one rank, with the seconds of machine.py and links.py; a test holds the two to each other.
const priced = {
  gather(nbytes, n, per, inside, between) {
    per = Math.min(n, per);
    const nodes = Math.ceil(n / per);
    const near = nbytes * (per - 1) / per / inside[1];
    const far = nodes > 1 ? nbytes * (n - 1) / n / (per * between[1]) : 0;
    return (n - nodes) * inside[0] + (nodes - 1) * between[0] + Math.max(near, far);
  },
  call(name, nbytes, n, nodes, inside, between) {
    if (n < 2) return 0;
    const per = Math.ceil(n / nodes), [latency, rate] = nodes > 1 ? between : inside;
    if (name.startsWith("all_to_all")) {
      const parts = [nbytes * (per - 1) / n / inside[1], nbytes * (n - per) / n / between[1]];
      return latency + Math.max(...parts);
    }
    const gathered = this.gather(nbytes, n, per, inside, between);
    if (name.startsWith("all_reduce")) return 2 * gathered;
    if (/^(all_gather|reduce_scatter)/.test(name)) return gathered;
    const levels = Math.ceil(Math.log2(n));
    if (name.includes("barrier")) return 2 * levels * latency;
    return levels * latency + (/^(gather|scatter)/.test(name) ? n - 1 : 1) * nbytes / rate;
  },
  replay(data, set) {
    const [flops, memory, shortest, perNode] = data.machine, ranks = set.ranks ?? data.ranks;
    const links = ["inside", "between"].map((name, i) => [
      data.links[i][0] * (set.latency ?? 1), name in set ? 1e9 * set[name] : data.links[i][1],
    ]);
    links[0][1] /= Math.min(data.shared ?? 1, ranks, perNode);
    const tokens = data.sliders.find((slider) => slider.name === "tokens");
    const more = set.tokens ? set.tokens / tokens.values[0] - 1 : 0;
    const wider = 2 * (1 - data.ranks / ranks);
    const size = ([base, t, r]) => Math.max(0, base + more * t + wider * r);
    const clocks = {}, taken = [0, 0], begins = [], ends = [], events = data.tape.map((k) => data.kinds[k]);
    let computing = 0;
    events.forEach(([kind, stream, ...about], i) => {
      const now = begins[i] = clocks[stream] ?? 0;
      ends[i] = now;
      if (kind === "kernel") {
        const [slowdown, seconds, operations, nbytes] = about;
        const roads = [size(operations) * slowdown / flops, size(nbytes) / memory, shortest];
        clocks[stream] = ends[i] = now + (seconds || Math.max(...roads));
        if (!stream) computing += ends[i] - now;
      } else if (kind === "call") {
        const n = about[2] || ranks, nodes = about[3] || Math.ceil(ranks / perNode);
        const link = +(nodes > 1);
        begins[i] = Math.max(now, taken[link]);
        ends[i] = taken[link] = begins[i] + this.call(about[0], size(about[1]), n, nodes, ...links);
      } else if (kind === "wait" && about[0]) {
        clocks[stream] = ends[i] = Math.max(now, ends[i - about[0]]);
      }
    });
    const seconds = Math.max(0, ...Object.values(clocks), ends.reduce((a, b) => Math.max(a, b), 0));
    return { events, begins, ends, seconds, exposed: seconds - computing };
  },
  WIDE: 720, LEFT: 96, LANE: 22, FILLS: ["#37474f", "#b0bec5", "#8d6e63"],
  bars({ events, begins, ends, seconds }) {
    const found = [], close = seconds / this.WIDE;
    let last = null;
    events.forEach(([kind, stream, ...about], i) => {
      if (kind === "call") found.push({ lane: 2, fill: this.FILLS[2], begin: begins[i], end: ends[i] });
      if (kind !== "kernel" || stream) return;
      const bar = { lane: 1, fill: this.FILLS[about[2][0] ? 0 : 1], begin: begins[i], end: ends[i] };
      const own = last ? last.end - last.begin : 0, short = Math.min(own, bar.end - bar.begin) < close / 2;
      if (last && bar.begin - last.end < close / 4 && (last.fill === bar.fill || short)) {
        if (own < bar.end - bar.begin) last.fill = bar.fill;
        last.end = bar.end;
      } else found.push(last = bar);
    });
    return found;
  },
  tag(kind, attributes, inside = "") {
    const named = Object.entries(attributes).map(([name, value]) => " " + name + '="' + value + '"');
    return "<" + kind + named.join("") + ">" + inside + "</" + kind + ">";
  },
  ticks(reach) {
    const power = 10 ** Math.floor(Math.log10(reach));
    const step = [0.2, 0.5, 1, 2].map((n) => n * power).find((size) => reach / size < 6);
    return Array.from({ length: Math.trunc(reach / step) + 1 }, (_, i) => i * step);
  },
  draw(played, first) {
    const { WIDE, LEFT, LANE } = this, reach = Math.max(played.seconds, first) || 1;
    const scale = WIDE / reach, parts = [];
    const text = (x, y, says, anchor = "middle") =>
      parts.push(this.tag("text", { x, y, "font-size": 12, "text-anchor": anchor, fill: "#1a1a1a" }, says));
    const box = (x, y, wide, high, fill) =>
      parts.push(this.tag("rect", { x: x.toFixed(1), y, width: wide.toFixed(1), height: high, fill }));
    const open = {};
    played.events.forEach(([kind, , name, begins], i) => {
      if (kind !== "mark" || !name) return;
      if (begins) { open[name] = played.begins[i]; return; }
      const wide = scale * (played.begins[i] - open[name]);
      if (wide > 7 * name.length) text(LEFT + scale * open[name] + wide / 2, 16, name);
      box(LEFT + scale * open[name], 4, 0.7, 3 * LANE, "#9a9a9a");
    });
    text(LEFT - 8, LANE + 16, "kernels", "end");
    text(LEFT - 8, 2 * LANE + 16, "messages", "end");
    for (const bar of this.bars(played)) {
      const wide = Math.max(scale * (bar.end - bar.begin), 0.4);
      box(LEFT + scale * bar.begin, LANE * bar.lane + 3, wide, LANE - 4, bar.fill);
    }
    box(LEFT + scale * first, 4, 1.5, 3 * LANE, "#1a1a1a");
    box(LEFT + 546, 3 * LANE + 26, 1.5, 16, "#1a1a1a");
    text(LEFT + 558, 3 * LANE + 39, "end as priced, " + +(1e3 * first).toPrecision(4) + " ms", "start");
    for (const seconds of this.ticks(reach)) {
      text(LEFT + scale * seconds, 3 * LANE + 18, +(1e3 * seconds).toPrecision(6) + " ms");
    }
    ["products", "other kernels", "messages"].forEach((says, i) => {
      box(LEFT + 180 * i, 3 * LANE + 28, 12, 12, this.FILLS[i]);
      text(LEFT + 180 * i + 18, 3 * LANE + 39, says, "start");
    });
    const all = [0, 0, LEFT + WIDE + 60, 3 * LANE + 48].join(" ");
    const look = { style: "background:#fff;min-width:657px", "font-family": "Helvetica,Arial,sans-serif" };
    return this.tag("svg", { viewBox: all, width: "100%", "aria-hidden": true, ...look }, parts.join(""));
  },
  open(place) {
    const data = JSON.parse(place.dataset.tape);
    const rows = data.sliders.map(({ says, at, values }) => {
      return { says, at, labels: values.map((value) => (+value.toPrecision(4)).toLocaleString("en")) };
    });
    const start = Object.fromEntries(data.sliders.map((slider) => [slider.name, slider.values[slider.at]]));
    const first = this.replay(data, start).seconds;
    sliders.bars(place, rows, "timeline", (at, screen, words) => {
      const set = Object.fromEntries(data.sliders.map((slider, i) => [slider.name, slider.values[at[i]]]));
      const of = (name) => at[data.sliders.findIndex((slider) => slider.name === name)] ?? 0;
      const played = this.replay(data, set), full = data.full[of("tokens")][of("ranks")];
      const share = 100 * played.exposed / (played.seconds || 1);
      screen.innerHTML = this.draw(played, first);
      const [all, seen] = [played.seconds, played.exposed].map((time) => (1e3 * time).toFixed(0) + " ms");
      const fits = full > data.memory ? ": it does not fit." : ".";
      words.textContent = all + ", of which " + seen + " are exposed messages (" + share.toFixed(0) +
        "%). At most " + full.toFixed(1) + " GB of " + data.memory + " GB" + fits;
    });
  },
};
if (typeof document !== "undefined") document.querySelectorAll("[data-tape]").forEach((place) => priced.open(place));
