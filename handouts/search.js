// A search in the words of all sections, which stand in this page. (No dollar signs: pandoc.)
const sections = JSON.parse(document.getElementById('sections').textContent);
const field = document.getElementById('sought'), found = document.getElementById('found');

function element(name, ...inside) {
  const made = document.createElement(name);
  made.append(...inside);
  return made;
}

// How well a section fits: every word must be there, and one in a title counts most.
function score([, chapter, title, , text], words) {
  const head = (chapter + ' ' + title).toLowerCase(), low = text.toLowerCase();
  const each = words.map(word =>
    Math.min(low.split(word).length - 1, 9) + (head.includes(word) ? 20 : 0));
  return Math.min(...each) && each.reduce((a, b) => a + b);
}

// The words around the first hit, which is marked.
function excerpt(text, words) {
  const low = text.toLowerCase(), word = words.find(each => low.includes(each)) ?? '';
  const at = Math.max(0, low.indexOf(word)), end = at + word.length;
  return element('p', text.slice(Math.max(0, at - 60), at),
    element('mark', text.slice(at, end)), text.slice(end, at + 140));
}

function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.replaceChildren();
  if (!words.length) return;
  const hits = sections.map(section => [score(section, words), section])
    .filter(([value]) => value).sort((a, b) => b[0] - a[0]);
  const items = hits.slice(0, 12).map(([, [id, chapter, title, anchor, text]]) => {
    const link = element('a', anchor ? chapter + ': ' + title : chapter);
    link.href = id + '.html' + (anchor ? '#' + anchor : '');
    return element('li', link, excerpt(text, words));
  });
  found.append(element('p', hits.length ? hits.length + ' sections' : 'Nothing was found.'),
    element('ul', ...items));
}

field.disabled = false;
field.addEventListener('input', search);
field.form.addEventListener('submit', event => { event.preventDefault(); search(); });
