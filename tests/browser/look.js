// What a test asks of the page; every function returns plain data.
window.look = {
  panel: () => jupyterapp.shell.currentWidget,

  // The stored pictures that the page shows: their sizes, once they are there.
  async pictures() {
    const found = [];
    for (const image of document.querySelectorAll(
        '.jp-Notebook .jp-OutputArea-output img, .jp-Notebook .jp-OutputArea-output > svg')) {
      image.scrollIntoView({block: 'center'});
      if (image.decode) await image.decode().catch(() => null);
      const box = image.getBoundingClientRect();
      if (image.checkVisibility()) found.push([box.width, box.height, image.naturalWidth ?? 1]);
    }
    return found;
  },

  cells() {
    return look.panel().content.widgets.map((cell, i) => ({
      i, type: cell.model.type, tags: cell.model.getMetadata('tags') ?? [],
      count: cell.model.executionCount ?? null,
      outputs: cell.model.type === 'code' ? cell.model.sharedModel.toJSON().outputs : [],
    }));
  },

  // How many outputs are a live widget.
  widgets: () => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')].filter(
    output => output.matches('.jupyter-widgets') || output.querySelector('.jupyter-widgets')).length,

  idle: () => look.panel().sessionContext.session.kernel.status === 'idle',

  // True when every code cell has been run here (a cell that waits has no count), apart
  // from those that `edit` has put below itself for the reader.
  finished: () => look.idle() && look.panel().content.widgets.every(
    cell => cell.model.type !== 'code' || (cell.model.executionCount && cell.model.trusted)
      || cell.model.sharedModel.getSource().startsWith('# A copy of ')),

  trusted: () => look.panel().content.widgets.filter(
    cell => cell.model.type === 'code' && cell.model.trusted).length,

  // What is wider than the place that it has: [what, how much].
  overflows() {
    const found = [], outer = document.querySelector('.jp-WindowedPanel-outer');
    const note = (element, name) => {
      const more = element.scrollWidth - element.clientWidth;
      if (more > 1 && element.clientWidth > 0) found.push([name, more, element.innerText.slice(0, 60)]);
    };
    note(outer, 'the page');
    for (const output of document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')) {
      note(output, 'an output');
      const edge = output.getBoundingClientRect().right + 1;
      for (const inner of output.querySelectorAll('img, svg, table, pre, canvas')) {
        const box = inner.getBoundingClientRect();
        if (box.width && box.right > edge
            && !inner.closest('.jp-RenderedMarkdown pre, [style*="overflow-x"]'))
          found.push([inner.tagName, box.right - edge, inner.innerText?.slice(0, 60) ?? '']);
      }
    }
    for (const text of document.querySelectorAll('.jp-Notebook .jp-MarkdownCell .jp-MarkdownOutput'))
      note(text, 'a text');
    return found;
  },

  // Words that do not stand out from what is behind them: [words, contrast]. The colours of
  // code are JupyterLab's.
  faint(least) {
    const channels = colour => colour.match(/[\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
      for (let e = element; e; e = e.parentElement) {
        const colour = channels(getComputedStyle(e).backgroundColor);
        if (colour.length < 4 || colour[3] > 0.5) return colour;
      }
      return [255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(
      document.querySelector('.jp-Notebook'), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement, words = walker.currentNode.data.trim();
      if (!words || !element.checkVisibility() || element.closest('svg, .cm-content, pre code, .jp-InputPrompt, .jp-OutputPrompt, .widget-play, math, .cm-gutters, .jp-Placeholder'))
        continue;
      const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < least) found.push([words.slice(0, 40), contrast]);
    }
    return found;
  },

  // What one output shows now, apart from its controls: pictures and words.
  shows(output) {
    const seen = [];
    for (const e of output.querySelectorAll('img, svg, table, pre, p, .widget-html-content'))
      if (e.checkVisibility() && !e.closest('.widget-slider, .widget-play, .widget-dropdown'))
        seen.push(e.tagName === 'IMG' ? e.src : e.outerHTML);
    return seen.join('\n');
  },
};
