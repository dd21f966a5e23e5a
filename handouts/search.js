// A search in the words of all sections, which stand in this page.
const sections = JSON.parse(document.getElementById('sections').textContent)
  .map(([id, chapter, title, anchor, words]) => ({
    id, chapter, title, anchor, words,
    head: `${chapter} ${title}`.toLowerCase(), low: words.toLowerCase(),
  }));
const field = document.getElementById('sought'), found = document.getElementById('found');
const MOST = 12;

// How well a section fits: every word must be there, and one in a title counts most.
function score(section, words) {
  let sum = 0;
  for (const word of words) {
    const often = section.low.split(word).length - 1, titled = section.head.includes(word);
    if (!often && !titled) return 0;
    sum += Math.min(often, 9) + (titled ? 20 : 0);
  }
  return sum;
}

// The words around the first hit, marked.
function excerpt(section, words) {
  const line = document.createElement('p');
  const first = section.low.indexOf(words.find(word => section.low.includes(word)));
  const text = section.words.slice(Math.max(0, first - 60), Math.max(0, first) + 140);
  const sought = words.map(word => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('|');
  text.split(new RegExp(`(${sought})`, 'gi')).forEach((part, i) => {
    const piece = i % 2 ? document.createElement('mark') : document.createElement('span');
    piece.textContent = part;
    line.append(piece);
  });
  return line;
}

function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.replaceChildren();
  if (!words.length) return;
  const hits = sections.map(section => [score(section, words), section])
    .filter(([value]) => value).sort((a, b) => b[0] - a[0]);
  const count = document.createElement('p');
  count.textContent = hits.length ? `${hits.length} sections` : 'Nothing was found.';
  const list = document.createElement('ul');
  for (const [, section] of hits.slice(0, MOST)) {
    const item = document.createElement('li'), link = document.createElement('a');
    link.href = `${section.id}.html${section.anchor ? '#' + section.anchor : ''}`;
    link.textContent = section.anchor ? `${section.chapter}: ${section.title}` : section.chapter;
    item.append(link, excerpt(section, words));
    list.append(item);
  }
  found.append(count, list);
}

field.disabled = false;
field.addEventListener('input', search);
field.form.addEventListener('submit', event => { event.preventDefault(); search(); });
