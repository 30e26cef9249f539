// The charts, drawn by plotly.js in the page's own colours; called by app.js with data only.
import {bytes, number} from "./format.js";

const CONFIG = {displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false};
const LABEL_GAP = 15; // pixels between two labels at the ends of lines
const MARGIN = {t: 10, b: 34};
const drawn = new WeakMap();

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const colour = (series) => css(series ? `--series-${series}` : "--series-rest");

/** plotly.js reads dates without a zone as they stand: write the viewer's own time. */
function localTime(seconds) {
  const moment = new Date(seconds * 1000);
  return new Date(moment - moment.getTimezoneOffset() * 60000).toISOString().slice(0, -1);
}

/** Redraw only what changed: a chart that stays the same keeps its hover label. */
function draw(node, signature, make) {
  if (!window.Plotly) return;
  const full = `${css("--page")}|${node.clientWidth}|${signature}`;
  if (drawn.get(node) === full) return;
  drawn.set(node, full);
  const {data, layout} = make();
  window.Plotly.react(node, data, layout, CONFIG);
}

function frame(overrides) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft")},
    hoverlabel: {bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--ink")}},
    ...overrides,
  };
}

const axis = (overrides) => ({
  gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), fixedrange: true,
  automargin: false, ...overrides,
});

/** Heights in pixels near `wanted`, in the same order, at least LABEL_GAP apart. */
function spread(wanted, low, high) {
  const order = wanted.map((_, index) => index).sort((a, b) => wanted[a] - wanted[b]);
  const placed = [...wanted];
  let floor = low;
  for (const index of order) { placed[index] = Math.max(placed[index], floor); floor = placed[index] + LABEL_GAP; }
  let ceiling = high;
  for (const index of order.reverse()) { placed[index] = Math.min(placed[index], ceiling); ceiling = placed[index] - LABEL_GAP; }
  return placed;
}

function range(values, include) {
  let low = Math.min(...include), high = Math.max(...include);
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const pad = high > low ? 0.07 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low - pad, high + pad];
}

/**
 * One line per member, each labelled at its end with its name and newest value.
 * `lines`: [{name, series, points: [[seconds, value], …]}]; `highlighted`: a name or null.
 */
export function drawCurves(node, metric, lines, highlighted) {
  const signature = JSON.stringify([metric, highlighted, lines.map((l) => [l.name, l.series, l.points.length, l.points.at(-1)])]);
  draw(node, signature, () => {
    const narrow = node.clientWidth < 560;
    const longest = Math.max(...lines.map((line) => line.name.length));
    const room = Math.min(narrow ? 110 : 190, 60 + 7 * longest);
    const bound = metric.includes("_vs_") ? 1 : null;
    const values = lines.flatMap((line) => line.points.map((point) => point[1]));
    const [low, high] = range(values, bound == null ? [values[0]] : [bound]);
    const height = node.clientHeight - MARGIN.t - MARGIN.b;
    const wanted = lines.map((line) => ((line.points.at(-1)[1] - low) / (high - low)) * height);
    const placed = spread(wanted, 6, height - 6);
    const faint = (line) => highlighted != null && line.name !== highlighted;
    const end = Math.max(...lines.map((line) => line.points.at(-1)[0]));
    const letters = Math.floor((room - 50) / 7);
    const data = lines.map((line) => ({
      type: "scatter", mode: line.points.length > 1 ? "lines" : "markers", name: escape(line.name),
      x: line.points.map((point) => localTime(point[0])), y: line.points.map((point) => point[1]),
      line: {color: colour(line.series), width: line.name === highlighted ? 3 : 2},
      marker: {color: colour(line.series), size: 7}, opacity: faint(line) ? 0.25 : 1,
      hovertemplate: `${escape(line.name)}: %{y:.4~g}<br>%{x|%H:%M:%S}<extra></extra>`,
    }));
    const annotations = lines.map((line, index) => {
      const name = line.name.length > letters ? `${line.name.slice(0, letters - 1)}…` : line.name;
      return {
        x: 1, xref: "paper", xanchor: "left", xshift: 6, y: low, yref: "y", yshift: placed[index], yanchor: "middle",
        text: `${escape(name)} ${number(line.points.at(-1)[1])}`, showarrow: false, align: "left",
        font: {color: colour(line.series)}, opacity: faint(line) ? 0.45 : 1,
      };
    });
    const shapes = [];
    if (bound != null) {
      const other = metric.endsWith("_rule") ? "the rule" : "LeastAllocated";
      shapes.push({type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: bound, y1: bound, line: {color: css("--soft"), width: 1, dash: "dot"}});
      annotations.push({x: 1, xref: "paper", xanchor: "right", y: bound, yref: "y", yanchor: "bottom", text: `1 = ${other}; lower is better`, showarrow: false, font: {color: css("--soft"), size: 11}});
    }
    const first = Math.min(...lines.map((line) => line.points[0][0]));
    const layout = frame({
      margin: {l: 48, r: room, ...MARGIN}, annotations, shapes, hovermode: "closest",
      xaxis: axis({type: "date", showgrid: false, nticks: narrow ? 3 : 8, tickangle: 0, range: [localTime(first), localTime(Math.max(end, first + 1))]}),
      yaxis: axis({range: [low, high], nticks: 6}),
    });
    return {data, layout};
  });
}

/** The least of 1, 2, 5, 10, 20, … that is not below `wanted`. */
function niceStep(wanted) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, wanted)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= wanted);
}

/** Bytes from and to the members in every finished round, oldest first. */
export function drawTraffic(node, finished) {
  const rounds = node.clientWidth < 560 ? finished.slice(-20) : finished;
  const signature = JSON.stringify([rounds[0].number, rounds.at(-1).number, rounds.at(-1).bytes_in, rounds.length]);
  draw(node, signature, () => {
    const bar = (name, key, token) => ({
      type: "bar", name, x: rounds.map((round) => round.number), y: rounds.map((round) => round[key]),
      marker: {color: css(token)}, customdata: rounds.map((round) => bytes(round[key])),
      hovertemplate: `Round %{x}: %{customdata} ${name}<extra></extra>`,
    });
    const tallest = Math.max(1, ...rounds.flatMap((round) => [round.bytes_in, round.bytes_out]));
    const step = niceStep(tallest / 4);
    const ticks = Array.from({length: Math.floor(tallest / step) + 1}, (_, index) => index * step);
    const layout = frame({
      barmode: "group", bargap: 0.25, bargroupgap: 0.05, margin: {l: 60, r: 10, t: 10, b: 40},
      xaxis: axis({showgrid: false, title: {text: "Round", standoff: 6}, tickformat: "d", nticks: 12, dtick: rounds.length < 12 ? 1 : undefined}),
      yaxis: axis({range: [0, 1.05 * tallest], tickvals: ticks, ticktext: ticks.map(bytes)}),
    });
    return {data: [bar("up", "bytes_in", "--up"), bar("down", "bytes_out", "--down")], layout};
  });
}
