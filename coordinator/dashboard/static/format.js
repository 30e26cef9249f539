// Numbers, sizes and times as the page writes them; used by app.js and charts.js.

const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const short = new Intl.NumberFormat("en", {minimumSignificantDigits: 3, maximumSignificantDigits: 3});
const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** A count, with thousands marked. */
export const count = (value) => (value == null ? "–" : whole.format(value));

/** A measured value, three digits. */
export function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 1e7) ? size.toExponential(1)
    : size >= 100 || size === 0 ? whole.format(size) : short.format(size);
  return value < 0 ? `−${text}` : text;
}

/** A ratio as a signed percentage. */
export function signed(ratio) {
  const percent = 100 * ratio;
  return `${percent > 0 ? "+" : percent < 0 ? "−" : ""}${Math.abs(percent).toFixed(1)} %`;
}

/** A size in SI units. */
export function bytes(value) {
  if (value == null) return "–";
  let size = value, unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) { size /= 1000; unit += 1; }
  return `${unit && size < 99.95 ? size.toFixed(1) : whole.format(size)} ${UNITS[unit]}`;
}

/** A duration, seconds. */
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.0995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
}

/** How long ago a moment was, both in seconds since the epoch by the hub's clock. */
export function ago(moment, now) {
  const seconds = Math.max(0, now - moment);
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} days ago`;
}

/** Time of day; with the date when it is not today. */
export function clockTime(seconds) {
  const moment = new Date(seconds * 1000);
  const time = moment.toLocaleTimeString("en-GB");
  return moment.toDateString() === new Date().toDateString() ? time : `${moment.toLocaleDateString("en-CA")} ${time}`;
}
