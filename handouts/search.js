// A search in the words of all sections, which stand in this page. (No dollar signs: pandoc.)
const sections = JSON.parse(document.getElementById('sections').textContent);
const field = document.getElementById('sought'), found = document.getElementById('found');

function element(name, ...inside) {
  const made = document.createElement(name);
  made.append(...inside);
  return made;
}

// Words that stand for each other; the first is what people type.
const same = ['fsdp|fully shard', 'oom|out of memory', 'moe|experts|mixture of experts', 'amp|mixed precision|autocast',
  'deadlock|hang', 'timeout|timed out', 'tp|tensor parallel', 'pp|pipeline', 'lr|learning rate',
  'cp|context parallel|long sequences|ring attention', 'sp|sequence parallel', 'ep|experts', 'dp|data parallel',
  'checkpointing|checkpoint', 'sharded|sharding', 'preemption|survival', 'gil|global interpreter', 'bf16|bfloat16|mixed precision',
  'fp16|float16|half precision', 'fp32|float32', 'fp8|float8', 'zero|sharding|optimizer state', 'ddp|distributeddataparallel',
  'load balancing|load balance|capacity', 'install|two commands', 'multi node|multinode|two nodes|nodes',
  'gradient accumulation|accumulat', 'colab|binder', 'dataloader|loader', 'overlap|hidden|hide', 'recompute|activation checkpoint',
  'logbook|log book', 'elastic|survival', 'nvlink|nv link', 'tokens per second|mfu', 'mac|macos', 'pdf|books'].map(group => group.split('|'));

// What was typed as words; one of several words that is known stays together.
function terms(typed) {
  let rest = ' ' + typed.toLowerCase().replace(/\s+/g, ' ') + ' ';
  const phrases = same.flat().filter(word => word.includes(' ') && rest.includes(' ' + word + ' '));
  for (const phrase of phrases) rest = rest.replace(' ' + phrase + ' ', '  ');
  return [...phrases, ...rest.split(' ').filter(word => /[^-_]/.test(word))];
}

// A word as it may be written: all_reduce, all-reduce, all reduce and allreduce are one.
function written(word) {
  const each = [...word.replace(/[-_ ]/g, '')].map(c => /\w/.test(c) ? c : '\\' + c);
  return each.join('[-_ ]?');
}

// What finds a word: the whole of a short one, or else the beginning of words, or else any part.
function finder(word) {
  const bare = each => each.replace(/[-_ ]/g, '');
  const group = same.find(each => each.some(one => bare(one) === bare(word))) ?? [word];
  const any = '(?:' + group.map(written).join('|') + ')', begins = '(?<![a-z0-9])';
  const ways = [begins + any, any].map(way => new RegExp(way, 'gi'));
  if (word.length < 4) ways.unshift(new RegExp(begins + any + 's?(?![a-z])', 'gi'));
  const there = way => sections.some(([, chapter, title, , text]) =>
    (chapter + ' ' + title + ' ' + text).search(way) >= 0);
  const found = ways.find(there) ?? ways[0];
  found.typed = new RegExp(begins + written(word), 'gi');
  return found;
}

// How well a section fits: every word must be there, and one in a title counts most. A chapter
// named so comes first, and a chapter before the README, and that before another page.
function score([id, chapter, title, anchor, text], finders) {
  const begins = anchor ? 0 : 10, numbered = /^\d/.test(chapter) ? 5 : id === 'readme' ? 3 : 0;
  const each = finders.map(word => {
    const there = Math.min((text.match(word) ?? []).length, 9) +
      ((chapter + ' ' + title).search(word) >= 0 ? 20 : 0);
    return there && there + numbered + (chapter.search(word) >= 0 ? begins : 0);
  });
  return Math.min(...each) && each.reduce((a, b) => a + b);
}

// Whole words around the first hit, which is marked: of what was typed, or else of a synonym.
function excerpt(text, finders) {
  const first = word => word && [...text.matchAll(word)][0];
  const hit = finders.map(word => first(word.typed)).find(Boolean) ??
    finders.map(first).find(Boolean);
  const at = hit ? hit.index : 0, end = at + (hit ? hit[0].length : 0);
  const seen = hit ? element('mark', hit[0]) : ''; // none where a title has the word
  const before = text.slice(0, at), after = text.slice(end);
  const said = before.length > 60 ? '… ' + before.slice(before.indexOf(' ', at - 60) + 1) : before;
  const cut = after.length > 140 ? after.lastIndexOf(' ', 140) : after.length;
  return element('p', said, seen,
    cut < after.length ? after.slice(0, Math.max(cut, 0)) + ' …' : after);
}

function search() {
  const words = terms(field.value);
  found.replaceChildren();
  if (!words.length) return;
  const finders = words.map(finder);
  const hits = sections.map(section => [score(section, finders), section])
    .filter(([value]) => value).sort((a, b) => b[0] - a[0]);
  const items = hits.map(([, [id, chapter, title, anchor, text]]) => {
    const link = element('a', anchor ? chapter + ': ' + title : chapter);
    link.href = id + '.html' + (anchor ? '#' + anchor : '');
    return () => element('li', link, excerpt(text, finders));
  });
  const list = element('ul', ...items.slice(0, 12).map(item => item()));
  found.append(element('p', hits.length ? hits.length + ' sections' : 'Nothing was found.'), list);
  if (hits.length <= 12) return;
  const more = element('button', 'show all ' + hits.length);
  more.onclick = () => { list.append(...items.slice(12).map(item => item())); more.remove(); };
  found.append(more);
}

field.disabled = false;
field.addEventListener('input', search);
field.form.addEventListener('submit', event => { // Enter goes to the first
  event.preventDefault();
  search();
  found.querySelector('a')?.click();
});
field.value = new URLSearchParams(location.search).get('q') ?? '';
search();
if (field.value) field.form.scrollIntoView(); // asked on a chapter's page
