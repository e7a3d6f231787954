
const tip = document.getElementById('tip');
const pictures = [...document.querySelectorAll('figure > svg')];
pictures.forEach((svg, i) => {
  const d = DATA[i];
  svg.querySelectorAll('title').forEach(title => title.remove());
  svg.addEventListener('mousemove', event => {
    const at = new DOMPoint(event.clientX, event.clientY)
      .matrixTransform(svg.getScreenCTM().inverse());
    const row = d.rows[Math.floor((at.y - d.top) / d.rowHeight)];
    const cell = row && row.findLast(([left, top, right, bottom]) =>
      left <= at.x && at.x < right && top <= at.y && at.y < bottom);
    tip.style.display = cell ? 'block' : 'none';
    if (!cell) return;
    tip.textContent = cell[4];
    const room = window.innerWidth - tip.offsetWidth - 8;
    tip.style.left = Math.min(event.clientX + 12, room) + 'px';
    tip.style.top = (event.clientY + 14) + 'px';
  });
  svg.addEventListener('mouseleave', () => { tip.style.display = 'none'; });
});
const zoom = factor => pictures.forEach(svg => ['width', 'height'].forEach(side =>
  svg.setAttribute(side, svg.getAttribute(side) * factor)));
document.getElementById('in').onclick = () => zoom(1.5);
document.getElementById('out').onclick = () => zoom(1 / 1.5);
