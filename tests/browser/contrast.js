// The words whose contrast is below 4.5 : 1 with the solid ground behind them, where axe only
// says that it cannot tell: behind code and tables there is a gradient over that ground.
() => {
  const parts = text => text.match(/[\d.]+/g).map(Number);
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = place => {
    for (; place; place = place.parentElement) {
      const colour = parts(getComputedStyle(place).backgroundColor);
      if ((colour[3] ?? 1) === 1) return colour;
    }
    return [255, 255, 255];
  };
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = {};
  while (words.nextNode()) {
    const node = words.currentNode, place = node.parentElement;
    if (!node.data.trim() || !place.checkVisibility({ opacityProperty: true })
      || place.closest("script, style, svg, math")) continue;
    const pair = [parts(getComputedStyle(place).color), ground(place)].map(light);
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) faint[place.tagName + "." + place.className + ": " + node.data.slice(0, 30)] = ratio;
  }
  return faint;
}
