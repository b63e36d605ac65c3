"""Looks and behaviour of a study's page, as CSS and JavaScript that need no other file."""

from __future__ import annotations

STYLE = """
body { margin: 0; background: #fff; color: #222; font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto,
  'DejaVu Sans', sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { margin: 0 0 8px; font-size: 30px; }
h2 { margin: 48px 0 8px; font-size: 23px; border-bottom: 1px solid #ddd; }
h3 { margin: 28px 0 0; font-size: 17px; }
figure { margin: 0; }
.note { background: #f3f6fb; border-left: 4px solid #0072b2; padding: 8px 14px; }
.look { margin: 2px 0 6px; color: #555; font-size: 14px; }
.wide { overflow-x: auto; }
.plot { min-height: 120px; }
table { border-collapse: collapse; font-size: 13px; margin: 12px 0; }
th, td { padding: 4px 10px; border-bottom: 1px solid #e5e5e5; text-align: left; vertical-align: top; }
th { background: #f5f5f5; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
td.n { white-space: nowrap; }
tr.differs td { background: #fff4e5; }
tr.absent td { color: #888; }
select { font: inherit; padding: 2px 6px; }
"""

# A plot is drawn when its setting is shown for the first time: drawing all at once takes a browser many seconds.
SCRIPT = """
const PLOTS = JSON.parse(document.getElementById('plots').textContent);
function draw(root) {
  for (const place of root.querySelectorAll('.plot')) {
    const setting = place.closest('.setting');
    if (place.dataset.drawn || (setting && setting.hidden)) continue;
    place.dataset.drawn = '1';
    const figure = PLOTS[place.dataset.plot];
    Plotly.newPlot(place, figure.data, figure.layout, CONFIG);
  }
}
const select = document.getElementById('setting');
if (select) {
  const show = () => {
    for (const part of document.querySelectorAll('.setting')) part.hidden = part.dataset.setting !== select.value;
    draw(document);
  };
  select.addEventListener('change', show);
  show();
} else {
  draw(document);
}
"""
