'use strict';
// DATA has `plan` (the figures of a plan), `rows` (its timeline), `search` (plans that were found)
// and `colors`. Each part is null if there is none.

const main = document.querySelector('main');
const tip = document.getElementById('tip');
const NAMESPACE = 'http://www.w3.org/2000/svg';

// Quantities

const figures3 = x => x === 0 ? '0' : Number(x.toPrecision(3)).toLocaleString('en', {maximumFractionDigits: 9});
const scaled = (x, base, units) => {
  let at = 0;
  while (Math.abs(x) >= base * 0.9995 && at < units.length - 1) { x /= base; at++; }
  return `${figures3(x)} ${units[at]}`;
};
const bytes = x => scaled(x, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB']);
const count = x => scaled(x, 1000, ['', 'k', 'M', 'G', 'T', 'P']).replace(' ', '');
const seconds = x => x >= 1 || x <= 0 ? `${figures3(x)} s`
  : x >= 1e-3 ? `${figures3(x * 1e3)} ms` : `${figures3(x * 1e6)} us`;
const percent = x => `${(100 * x).toFixed(x >= 0.0005 && x < 0.0995 ? 1 : 0)}%`;

// Elements

function make(name, attributes = {}, ...children) {
  const element = name.startsWith('svg:')
    ? document.createElementNS(NAMESPACE, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.filter(child => child !== null));
  return element;
}

function section(id, title, ...children) {
  const element = make('section', {id}, make('h2', {}, title), ...children);
  main.append(element);
  return element;
}

function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  const below = event.clientY + 16;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : event.clientY - tip.offsetHeight - 10}px`;
}
const withTip = text => ({
  onmousemove: event => showTip(event, text),
  onmouseleave: event => showTip(event, ''),
});

const legend = names => make('div', {class: 'legend'}, ...names.map(([name, color]) =>
  make('span', {}, make('i', {style: `background:${color}`}), name)));

const text = (x, y, words, attributes = {}) => make('svg:text', {x, y, ...attributes}, words);

// Stacked bars: rows are {name, note, parts: [{name, value, color}]}.

function bars(rows, whole, format, {mark = 0, markName = ''} = {}) {
  const left = 92, right = 250, width = 1180, height = 26, top = mark ? 20 : 4;
  const x = value => left + (width - left - right) * value / whole;
  const svg = make('svg:svg', {viewBox: `0 0 ${width} ${top + rows.length * height + 4}`});
  rows.forEach((row, i) => {
    const y = top + i * height;
    svg.append(text(left - 8, y + 16, row.name, {'text-anchor': 'end'}));
    svg.append(make('svg:rect', {x: left, y: y + 2, width: width - left - right, height: height - 5, fill: '#f4f4f4'}));
    let sum = 0;
    for (const part of row.parts) {
      if (part.value <= 0) continue;
      svg.append(make('svg:rect', {
        x: x(sum), y: y + 2, width: x(sum + part.value) - x(sum), height: height - 5, fill: part.color,
        ...withTip(`${row.name}: ${part.name}\n${format(part.value)}${part.note || ''}`),
      }));
      sum += part.value;
    }
    svg.append(text(width - right + 8, y + 16, row.note));
  });
  if (mark) {
    svg.append(make('svg:path', {d: `M${x(mark)} ${top - 4}V${top + rows.length * height}`, stroke: '#b3261e', 'stroke-width': 2}));
    svg.append(text(x(mark), top - 7, markName, {'text-anchor': x(mark) > width / 2 ? 'end' : 'start', fill: '#b3261e'}));
  }
  return svg;
}

function showHead(plan) {
  const device = plan.hardware, time = plan.time;
  const degrees = Object.entries(plan.degrees).filter(([, degree]) => degree > 1);
  main.append(make('p', {}, `${plan.num_ranks.toLocaleString('en')} ranks`
    + (degrees.length ? `: ${degrees.map(([axis, degree]) => `${axis} ${degree}`).join(' x ')}` : '')
    + (device ? `, on ${device.name}` : '')));
  const card = (name, value, bad = false) =>
    make('div', {class: bad ? 'card bad' : 'card'}, make('b', {}, value), make('span', {}, name));
  const cards = make('div', {class: 'cards'});
  if (time) {
    cards.append(card('a step', seconds(time.seconds)), card('tokens/s of a rank', count(time.tokens_per_second)));
    if (time.mfu !== null) cards.append(card('MFU', percent(time.mfu)));
    cards.append(card('hardware utilization', percent(time.hfu)));
    if (plan.degrees.pp > 1) cards.append(card('idle in the pipeline', percent(time.bubble)));
  }
  const fits = !device || plan.device_bytes <= device.memory_bytes;
  cards.append(card('memory of a rank' + (device ? ` of ${bytes(device.memory_bytes)}` : ''), bytes(plan.device_bytes), !fits));
  if (plan.host_bytes) {
    const most = device && device.host_memory_bytes;
    cards.append(card("the host's memory for a rank" + (most ? ` of ${bytes(most)}` : ''), bytes(plan.host_bytes),
      most && plan.host_bytes > most));
  }
  main.append(cards);
  if (time) main.append(make('p', {}, `What the step's time goes to: ${time.bound}.`));
  for (const line of plan.warnings) main.append(make('p', {class: 'warning'}, `Warning: ${line}.`));
  for (const one of plan.next) main.append(make('p', {}, `Next: ${one.text}.`));
  for (const line of plan.notes) main.append(make('p', {class: 'quiet'}, `Note: ${line}.`));
}

function showMemory(plan) {
  const hardware = plan.hardware || {};
  showPeaks(plan, 'memory', 'Memory of a rank at the peak of a step',
    rank => rank.peak, plan.peak_bytes, hardware.memory_bytes || 0, "the device's");
  if (plan.host_bytes)
    showPeaks(plan, 'host', "The host's memory of a rank at its peak, for CPU offload",
      rank => rank.host_peak, plan.host_bytes, hardware.host_memory_bytes || 0, "a rank's share,");
}

// A bar for each rank, of the bytes of each category at a peak; limit is 0 if it is not known.
function showPeaks(plan, id, title, peakOf, most, limit, limitName) {
  const names = Object.keys(DATA.colors.memory)
    .filter(name => plan.ranks.some(rank => peakOf(rank).bytes_of[name] > 0));
  const rows = plan.ranks.map(rank => {
    const peak = peakOf(rank);
    return {
      name: `rank ${rank.rank}`,
      note: `${bytes(peak.bytes)}, ${peak.module ? `${peak.phase}, ${peak.module}` : peak.phase}`,
      parts: names.map(name => ({
        name, value: peak.bytes_of[name] || 0, color: DATA.colors.memory[name],
        note: `, ${percent((peak.bytes_of[name] || 0) / peak.bytes)} of the peak`,
      })),
    };
  });
  const isDrawn = most > 0.05 * limit && limit > 0;
  section(id, title,
    legend(names.map(name => [name, DATA.colors.memory[name]])),
    bars(rows, Math.max(most, isDrawn ? limit : 0), bytes,
      isDrawn ? {mark: limit, markName: `${limitName} ${bytes(limit)}`} : {}));
}

// What the seconds of a rank go to.
function timeParts(rank) {
  const parts = Object.entries(rank.compute_seconds).map(([kind, value]) => [kind, value]);
  const axes = {};
  for (const one of rank.traffic) axes[one.axis] = (axes[one.axis] || 0) + one.exposed_seconds;
  parts.push(...Object.entries(axes).map(([axis, value]) => [`${axis}, exposed`, value]));
  parts.push(['waiting for the host', rank.launch_seconds], ['idle', rank.idle_seconds]);
  return parts;
}

function showTime(plan) {
  const time = plan.time;
  const numbers = plan.ranks.map(rank => rank.rank);
  const of = numbers.map(number => Object.fromEntries(timeParts(time.ranks[number])));
  const names = Object.keys(DATA.colors.time).filter(name => of.some(parts => parts[name] > 1e-9));
  for (const parts of of) for (const name of Object.keys(parts)) if (!(name in DATA.colors.time)) names.push(name);
  const color = name => DATA.colors.time[name] || '#999999';
  section('time', 'Time of a rank in a step',
    legend(names.map(name => [name, color(name)])),
    bars(numbers.map((number, i) => ({
      name: `rank ${number}`,
      note: `${percent((of[i].idle || 0) / time.seconds)} idle`,
      parts: names.map(name => ({
        name, value: of[i][name] || 0, color: color(name),
        note: `, ${percent((of[i][name] || 0) / time.seconds)} of the step`,
      })),
    })), time.seconds, seconds));
}

function showAxes(plan) {
  const numbers = Object.keys(plan.time.ranks);
  const place = make('div');
  const choose = make('select', {onchange: () => draw(choose.value)},
    ...numbers.map(number => make('option', {value: number}, `rank ${number}`)));
  function draw(number) {
    const axes = {};
    for (const one of plan.time.ranks[number].traffic) {
      const axis = axes[one.axis] ||= {bytes: 0, exposed: 0, hidden: 0, count: 0};
      axis.bytes += one.num_bytes;
      axis.count += one.count;
      axis.exposed += one.exposed_seconds;
      axis.hidden += Math.max(0, one.busy_seconds - one.exposed_seconds);
    }
    const whole = Math.max(...Object.values(axes).map(axis => axis.exposed + axis.hidden), 1e-12);
    const order = Object.keys(DATA.colors.time);
    const sorted = Object.entries(axes).sort((a, b) =>
      order.indexOf(`${a[0]}, exposed`) - order.indexOf(`${b[0]}, exposed`));
    place.replaceChildren(bars(sorted.map(([name, axis]) => ({
      name, note: `${seconds(axis.exposed + axis.hidden)}, ${bytes(axis.bytes)} in ${axis.count.toLocaleString('en')} calls`,
      parts: [{name: 'exposed', value: axis.exposed, color: '#d55e00'}, {name: 'hidden', value: axis.hidden, color: '#f3c9a8'}],
    })), whole, seconds));
  }
  section('axes', 'Communication by mesh axis', make('div', {class: 'tools'},
    choose, legend([['exposed: the rank waits', '#d55e00'], ['hidden behind its work', '#f3c9a8']])), place);
  const busiest = numbers.reduce((a, b) => plan.time.ranks[b].idle_seconds < plan.time.ranks[a].idle_seconds ? b : a);
  choose.value = busiest;
  draw(busiest);
}

// The timeline: rows are {rank, stream, is_main, spans: [[start, end, name, kind, microbatch]]} with
// times in nanoseconds; name and kind are indices of DATA.names.

const GREY = {FETCH: 1, REDUCE_GRAD: 1};

function showTimeline() {
  const left = 118, width = 1180, names = DATA.names;
  const end = Math.max(...DATA.rows.map(row => row.spans.at(-1)[1]));
  const microbatches = 1 + Math.max(0, ...DATA.rows.flatMap(row => row.is_main ? row.spans.map(span => span[4]) : []));
  const numRanks = new Set(DATA.rows.map(row => row.rank)).size;
  let from = 0, until = end, rows = [], at = [], height = 0;
  const svg = make('svg:svg', {});
  const showsStreams = make('input', {type: 'checkbox', onchange: layout});
  showsStreams.checked = numRanks <= 4;

  function color(row, span, i) {
    const kind = names[span[3]];
    if (!row.is_main) return DATA.colors.communication[kind] || '#999999';
    const lightness = {F: 80, B: 64, I: 64, W: 50}[kind];
    if (lightness) return `hsl(${(205 + 300 * span[4] / microbatches) % 360} 58% ${lightness - 3 * (span[4] % 2)}%)`;
    return (DATA.colors.phase[kind] || ['#8a8a8a', '#9c9c9c'])[i % 2];
  }
  function layout() {
    rows = DATA.rows.filter(row => row.is_main || showsStreams.checked);
    at = [];
    let y = 8;
    for (const row of rows) {
      if (row.is_main && y > 8) y += showsStreams.checked ? 8 : 3;
      at.push(y);
      y += row.is_main ? 22 : 12;
    }
    height = y + 26;
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    draw();
  }
  function draw() {
    const scale = (width - left - 8) / (until - from);
    const x = time => left + (time - from) * scale;
    const drawn = [];
    rows.forEach((row, number) => {
      const y = at[number], tall = row.is_main ? 20 : 10;
      const label = row.is_main ? `rank ${row.rank}` : row.stream;
      const last = row.spans.length;
      let reached = -1;
      for (let i = firstAfter(row.spans, from); i < last && row.spans[i][0] < until; i++) {
        const span = row.spans[i];
        const start = Math.max(left, x(span[0])), stop = Math.min(width - 8, x(span[1]));
        // What is narrower than half a pixel is drawn once a pixel.
        if (stop - start < 0.5 && stop <= reached) continue;
        const wide = Math.max(0.5, stop - start - (stop - start > 3 ? 0.7 : 0));
        reached = start + Math.max(1, wide);
        drawn.push(make('svg:rect', {x: start.toFixed(2), y, width: wide.toFixed(2), height: tall, fill: color(row, span, i)}));
        if (row.is_main && stop - start > 34 && !(names[span[3]] in GREY)) {
          const words = names[span[2]];
          const room = Math.floor((stop - start - 6) / 6.3);
          const short = /^[FBIW]$/.test(names[span[3]]) ? `${names[span[3]]}${span[4]}` : words.replace(/^\w+ of /, '');
          const chosen = words.length <= room ? words : short.length <= room ? short : `\u2026${short.slice(short.length - room + 1)}`;
          if (chosen.length > 1) drawn.push(text((start + stop) / 2, y + 14, chosen, {'text-anchor': 'middle', 'pointer-events': 'none'}));
        }
      }
      drawn.push(make('svg:rect', {x: 0, y, width: left - 1, height: tall, fill: '#ffffff'}));
      drawn.push(text(left - 6, y + (row.is_main ? 14 : 8.5), label, {'text-anchor': 'end', 'font-size': row.is_main ? 11 : 9.5}));
    });
    for (const tick of ticks(from, until)) {
      drawn.push(make('svg:path', {d: `M${x(tick)} ${height - 22}v5`, stroke: '#888888'}));
      drawn.push(text(x(tick), height - 6, seconds(tick / 1e9), {'text-anchor': 'middle', 'font-size': 10}));
    }
    svg.replaceChildren(...drawn);
  }
  function zoom(factor, time = (from + until) / 2) {
    const span = Math.min(end, Math.max(end * 1e-6, 10, (until - from) * factor));
    const share = (time - from) / (until - from);
    from = Math.max(0, Math.min(end - span, time - share * span));
    until = from + span;
    draw();
  }
  function find(event) {
    const box = svg.getBoundingClientRect(), factor = width / box.width;
    const px = (event.clientX - box.left) * factor, py = (event.clientY - box.top) * factor;
    const time = from + (px - left) * (until - from) / (width - left - 8);
    const number = at.findIndex((y, i) => py >= y && py < y + (rows[i].is_main ? 20 : 10));
    if (number < 0 || px < left) return {time};
    const spans = rows[number].spans, slack = 1.5 * (until - from) / width;
    const span = spans.slice(firstAfter(spans, time - slack)).find(one => one[0] <= time + slack);
    return {time, row: rows[number], span: span && span[0] <= time + slack ? span : null};
  }
  svg.addEventListener('wheel', event => {
    event.preventDefault();
    zoom(Math.exp(0.0015 * event.deltaY), find(event).time);
  }, {passive: false});
  let drag = null;
  svg.addEventListener('pointerdown', event => {
    drag = {x: event.clientX, from, until};
    svg.setPointerCapture(event.pointerId);
    svg.classList.add('dragged');
  });
  svg.addEventListener('pointermove', event => {
    if (!drag) {
      const {row, span} = find(event);
      showTip(event, span ? `rank ${row.rank}: ${row.is_main ? '' : `${row.stream}, `}${names[span[2]]}\n`
        + `${seconds((span[1] - span[0]) / 1e9)}, from ${seconds(span[0] / 1e9)} to ${seconds(span[1] / 1e9)}` : '');
      return;
    }
    const box = svg.getBoundingClientRect();
    const moved = (event.clientX - drag.x) * (until - from) / (box.width * (width - left - 8) / width);
    from = Math.max(0, Math.min(end - (until - from), drag.from - moved));
    until = from + (drag.until - drag.from);
    draw();
  });
  for (const name of ['pointerup', 'pointercancel']) {
    svg.addEventListener(name, () => { drag = null; svg.classList.remove('dragged'); });
  }
  svg.addEventListener('pointerleave', event => showTip(event, ''));
  const whole = () => { from = 0; until = end; draw(); };
  svg.addEventListener('dblclick', whole);
  const kinds = [...new Set(DATA.rows.filter(row => !row.is_main).flatMap(row => row.spans.map(span => names[span[3]])))];
  section('timeline', 'Timeline of the step',
    make('div', {class: 'tools'},
      make('button', {id: 'out', onclick: () => zoom(1.6)}, '\u2212'),
      make('button', {id: 'in', onclick: () => zoom(1 / 1.6)}, '+'),
      make('button', {id: 'whole', onclick: whole}, 'whole step'),
      make('label', {}, showsStreams, ' communication'),
      make('span', {class: 'quiet'}, 'colour: microbatch; darker: backward; grey: other work; wheel zooms, drag moves, hover names')),
    legend(kinds.map(kind => [kind, DATA.colors.communication[kind] || '#999999'])), svg);
  layout();
}

// The index of the first span that ends after `time`; spans of a row do not overlap.
function firstAfter(spans, time) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle][1] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

function ticks(from, until, about = 8) {
  const rough = (until - from) / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const found = [];
  for (let tick = Math.ceil(from / step) * step; tick <= until * (1 + 1e-12); tick += step) found.push(tick);
  return found;
}

// The search: plans are {changes: {key: value}, tokens_per_second, seconds, peak_bytes, ...}.

const SHORT = {
  'parallelism.tensor_parallel_degree': 'tp', 'parallelism.pipeline_parallel_degree': 'pp',
  'parallelism.context_parallel_degree': 'cp', 'parallelism.data_parallel_shard_degree': 'dp_shard',
  'parallelism.data_parallel_replicate_degree': 'dp_replicate',
  'parallelism.expert_parallel_degree': 'ep',
  'parallelism.pipeline_parallel_schedule': 'schedule',
  'parallelism.pipeline_parallel_layers_per_stage': 'layers/stage',
  'parallelism.pipeline_parallel_microbatch_size': 'microbatch',
  'parallelism.fsdp_reshard_after_forward': 'reshard',
  'activation_checkpoint.mode': 'AC', 'activation_checkpoint.selective_ac_option': 'AC option',
  'training.local_batch_size': 'local batch', 'training.enable_cpu_offload': 'offload',
  'parallelism.enable_async_tensor_parallel': 'async tp',
  'parallelism.async_tensor_parallel_backend': 'async tp by',
  'parallelism.disable_loss_parallel': 'whole loss',
  'parallelism.context_parallel_load_balancer': 'cp order',
  'parallelism.context_parallel_rotate_method': 'cp rotation',
  'parallelism.pipeline_parallel_first_stage_less_layers': 'first less',
  'parallelism.pipeline_parallel_last_stage_less_layers': 'last less',
};
const short = key => SHORT[key] || key.split('.').at(-1);
const written = value => value === null || value === undefined ? '' : String(value);

function showSearch(search) {
  const plans = search.plans.map((plan, number) => ({...plan, number}));
  const front = new Set();
  let least = Infinity;
  for (const plan of [...plans].sort((a, b) => b.tokens_per_second - a.tokens_per_second || a.peak_bytes - b.peak_bytes)) {
    if (plan.peak_bytes < least) { front.add(plan.number); least = plan.peak_bytes; }
  }
  const known = Object.keys(SHORT), place = key => key in SHORT ? known.indexOf(key) : known.length;
  const keys = [...new Set(plans.flatMap(plan => Object.keys(plan.changes)))].sort((a, b) => place(a) - place(b));
  const columns = [
    {name: 'tokens/s', value: plan => plan.tokens_per_second, show: count},
    {name: 'step', value: plan => plan.seconds, show: seconds},
    {name: 'memory', value: plan => plan.peak_bytes, show: bytes, unit: 2 ** 30},
    ...(plans.some(plan => plan.host_bytes)
      ? [{name: 'host', value: plan => plan.host_bytes, show: x => x ? bytes(x) : '', unit: 2 ** 30}] : []),
    {name: 'MFU', value: plan => plan.mfu, show: x => x === null || x === undefined ? '' : percent(x), unit: 0.01},
    {name: 'bubble', value: plan => plan.bubble, show: x => x === null || x === undefined ? '' : percent(x), unit: 0.01},
    ...keys.map(key => ({name: short(key), value: plan => plan.changes[key], show: written,
      isText: plans.some(plan => typeof plan.changes[key] === 'string')})),
  ];
  let sorted = columns[0], ascending = false, selected = -1;
  const filter = make('input', {type: 'search', id: 'filter', placeholder: 'filter: tp=8 memory<60 1F1B', oninput: draw});
  const onlyFront = make('input', {type: 'checkbox', id: 'only-front', onchange: draw});
  const told = make('span', {class: 'quiet', id: 'told'});
  const table = make('div', {class: 'table'}), chart = make('div', {id: 'scatter'});
  const detail = make('div', {id: 'detail', hidden: ''});

  // A word is name=value, name<number, name>number, or a part of a value.
  function matches(plan) {
    return filter.value.trim().split(/\s+/).filter(Boolean).every(word => {
      const parts = word.match(/^([^=<>]+)(<=|>=|=|<|>)(.+)$/);
      const column = parts && columns.find(one => one.name.replace(/ /g, '') === parts[1]);
      if (!column) return keys.some(key => written(plan.changes[key]).toLowerCase().includes(word.toLowerCase()));
      const value = column.value(plan), wanted = parts[3];
      if (parts[2] === '=') return written(value) === wanted || column.show(value) === wanted;
      const number = Number(value) / (column.unit || 1), limit = Number(wanted);
      return {'<': number < limit, '>': number > limit, '<=': number <= limit, '>=': number >= limit}[parts[2]];
    });
  }
  function select(number) {
    selected = number;
    const plan = plans[number], sections = {};
    for (const [key, value] of Object.entries(plan.changes)) {
      const [section, ...rest] = key.split('.');
      (sections[section] ||= []).push(`${rest.join('.')} = ${JSON.stringify(value)}`);
    }
    const toml = Object.entries(sections).map(([name, lines]) => `[${name}]\n${lines.join('\n')}`).join('\n\n');
    detail.hidden = false;
    detail.replaceChildren(
      make('h2', {}, `${count(plan.tokens_per_second)} tokens/s of a rank, ${bytes(plan.peak_bytes)}`
        + (plan.host_bytes ? `, ${bytes(plan.host_bytes)} of its host` : '')),
      make('p', {}, `A step takes ${seconds(plan.seconds)}${plan.bound ? `: ${plan.bound}` : ''}.`),
      make('p', {class: 'quiet'}, front.has(number) ? 'On the Pareto front: every faster plan needs more memory.'
        : 'Another plan is at least as fast with less memory.'),
      make('pre', {}, toml));
    draw();
    detail.scrollIntoView({block: 'nearest'});
  }
  function draw() {
    const shown = plans.filter(plan => matches(plan) && (!onlyFront.checked || front.has(plan.number)));
    const order = (a, b) => typeof a === 'number' && typeof b === 'number' ? a - b
      : written(a).localeCompare(written(b), 'en', {numeric: true});
    shown.sort((a, b) => (ascending ? 1 : -1) * order(sorted.value(a), sorted.value(b)));
    told.textContent = `${shown.length.toLocaleString('en')} of ${plans.length.toLocaleString('en')} plans`
      + (shown.length > 500 ? ', the first 500 in the table' : '');
    const scrolled = [table.scrollLeft, table.scrollTop];
    table.replaceChildren(make('table', {},
      make('thead', {}, make('tr', {}, ...columns.map(column => make('th', {
        class: column.isText ? 'text' : null,
        onclick: () => { ascending = sorted === column ? !ascending : Boolean(column.isText); sorted = column; draw(); },
      }, column.name + (column === sorted ? (ascending ? ' \u25b4' : ' \u25be') : ''))))),
      make('tbody', {}, ...shown.slice(0, 500).map(plan => make('tr', {
        class: `${front.has(plan.number) ? 'front' : ''} ${plan.number === selected ? 'selected' : ''}`,
        onclick: () => select(plan.number),
      }, ...columns.map(column => make('td', {class: column.isText ? 'text' : null}, column.show(column.value(plan)))))))));
    [table.scrollLeft, table.scrollTop] = scrolled;
    chart.replaceChildren(scatter(plans, new Set(shown.map(plan => plan.number)), front, selected, select, search.memory_bytes));
  }
  const dropped = Object.entries(search.dropped || {});
  section('search', 'Search',
    make('p', {}, plans.length.toLocaleString('en')
      + (search.num_candidates ? ` of ${search.num_candidates.toLocaleString('en')}` : '') + ' plans fit and were timed'
      + (search.is_complete === false ? '; the search was interrupted' : '') + '.'),
    dropped.length ? make('p', {class: 'quiet'}, `Dropped: ${dropped.map(([reason, n]) => `${n.toLocaleString('en')} ${reason}`).join('; ')}.`) : null,
    legend([['on the Pareto front of memory and speed', '#d55e00'], ['other plans', '#0072b2'], ['filtered out', '#d8d8d8']]),
    chart,
    make('div', {class: 'tools'}, filter, make('label', {}, onlyFront, ' Pareto front only'), told),
    table, make('p', {class: 'quiet'}, 'An empty cell: the plan keeps the value of the job.'), detail);
  draw();
}

function scatter(plans, shown, front, selected, select, limit) {
  const width = 1180, height = 380, left = 74, right = 24, top = 14, bottom = 42;
  const most = Math.max(...plans.map(plan => plan.peak_bytes), limit || 0) * 1.03 / 2 ** 30;
  const fastest = Math.max(...plans.map(plan => plan.tokens_per_second)) * 1.06;
  const x = value => left + (width - left - right) * value / 2 ** 30 / most;
  const y = value => top + (height - top - bottom) * (1 - value / fastest);
  const svg = make('svg:svg', {viewBox: `0 0 ${width} ${height}`});
  for (const tick of ticks(0, most)) {
    svg.append(make('svg:path', {d: `M${x(tick * 2 ** 30)} ${top}V${height - bottom}`, stroke: '#eeeeee'}));
    svg.append(text(x(tick * 2 ** 30), height - bottom + 15, figures3(tick), {'text-anchor': 'middle'}));
  }
  for (const tick of ticks(0, fastest, 6)) {
    svg.append(make('svg:path', {d: `M${left} ${y(tick)}H${width - right}`, stroke: '#eeeeee'}));
    svg.append(text(left - 7, y(tick) + 4, count(tick), {'text-anchor': 'end'}));
  }
  svg.append(text((left + width - right) / 2, height - 8, 'memory of a rank, GiB', {'text-anchor': 'middle'}));
  svg.append(text(16, (top + height - bottom) / 2, 'tokens/s of a rank', {'text-anchor': 'middle', transform: `rotate(-90 16 ${(top + height - bottom) / 2})`}));
  if (limit) {
    svg.append(make('svg:path', {d: `M${x(limit)} ${top}V${height - bottom}`, stroke: '#b3261e', 'stroke-width': 1.5, 'stroke-dasharray': '5 4'}));
    svg.append(text(x(limit) - 6, top + 12, `the device's ${bytes(limit)}`, {'text-anchor': 'end'}));
  }
  const line = plans.filter(plan => front.has(plan.number)).sort((a, b) => a.peak_bytes - b.peak_bytes);
  svg.append(make('svg:path', {fill: 'none', stroke: '#d55e00', 'stroke-width': 1.5, d: line.map((plan, i) =>
    i ? `H${x(plan.peak_bytes)}V${y(plan.tokens_per_second)}` : `M${x(plan.peak_bytes)} ${y(plan.tokens_per_second)}`).join('')}));
  const rank = plan => (shown.has(plan.number) ? 1 : 0) + (front.has(plan.number) ? 2 : 0) + (plan.number === selected ? 4 : 0);
  for (const plan of [...plans].sort((a, b) => rank(a) - rank(b))) {
    const isShown = shown.has(plan.number), isFront = front.has(plan.number);
    svg.append(make('svg:circle', {
      cx: x(plan.peak_bytes), cy: y(plan.tokens_per_second), r: plan.number === selected ? 7 : isFront ? 4.5 : 3.5,
      fill: !isShown ? '#d8d8d8' : isFront ? '#d55e00' : '#0072b2', 'fill-opacity': isShown && !isFront ? 0.6 : 1,
      stroke: plan.number === selected ? '#1c1c1c' : 'none', 'stroke-width': 2, 'data-plan': plan.number,
      onclick: () => select(plan.number),
      ...withTip(`${count(plan.tokens_per_second)} tokens/s, ${bytes(plan.peak_bytes)}\n`
        + Object.entries(plan.changes).map(([key, value]) => `${short(key)} ${written(value)}`).join(', ')),
    }));
  }
  return svg;
}

main.append(make('h1', {}, document.title));
if (DATA.plan) {
  showHead(DATA.plan);
  showMemory(DATA.plan);
  if (DATA.plan.time) { showTime(DATA.plan); showAxes(DATA.plan); }
  if (DATA.rows.length) showTimeline();
}
if (DATA.search && DATA.search.plans.length) showSearch(DATA.search);
