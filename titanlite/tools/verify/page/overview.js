
const rows = [...document.querySelectorAll('tr[data-plan]')];
document.querySelectorAll('rect[data-plans]').forEach(cell => cell.onclick = () => {
  const again = cell.classList.contains('chosen');
  document.querySelectorAll('rect.chosen').forEach(other => other.classList.remove('chosen'));
  const plans = again ? null : new Set(cell.dataset.plans.split(' '));
  if (!again) cell.classList.add('chosen');
  rows.forEach(row => row.style.display = !plans || plans.has(row.dataset.plan) ? '' : 'none');
});
