// What a test asks of the page; every function returns plain data.
window.look = {
  panel: () => jupyterapp.shell.currentWidget,

  // The sizes of the pictures that the page shows, once they are there.
  async pictures() {
    const shown = '.jp-OutputArea-output img, .jp-OutputArea-output > svg';
    const images = [...document.querySelectorAll(shown)].filter(e => e.checkVisibility());
    for (const image of images) {
      image.scrollIntoView();
      await image.decode?.().catch(() => null);
    }
    return images.map(e => [e.clientWidth, e.clientHeight, e.naturalWidth ?? 1]);
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

  // The words of what is wider than the place that it has.
  overflows: () => [...document.querySelectorAll('.jp-WindowedPanel-outer, '
      + '.jp-Notebook .jp-OutputArea-output, .jp-MarkdownCell .jp-MarkdownOutput')]
    .filter(e => e.clientWidth && e.scrollWidth - e.clientWidth > 1)
    .map(e => e.innerText.slice(0, 60)),

  // What one output shows now, apart from its controls: pictures and words.
  shows(output) {
    const seen = [];
    for (const e of output.querySelectorAll('img, svg, table, pre, p, .widget-html-content'))
      if (e.checkVisibility() && !e.closest('.widget-slider, .widget-play, .widget-dropdown'))
        seen.push(e.tagName === 'IMG' ? e.src : e.outerHTML);
    return seen.join('\n');
  },
};
