// Numbers, sizes and times as people read them. null and undefined give "".

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export function number(value, digits = 3) {
  if (missing(value)) return "";
  const size = Math.abs(value);
  if (size >= 1e15 || (size !== 0 && size < 1e-4)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export function rate(value) {
  return missing(value) ? "" : value >= 100 ? Math.round(value).toLocaleString("en-US") : value.toFixed(1);
}

export function bytes(value) {
  if (missing(value)) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value;
  while (size >= 999.95 && units.length > 1) {
    size /= 1000;
    units.shift();
  }
  return `${units[0] === "B" ? Math.round(size) : size.toFixed(1)} ${units[0]}`;
}

export function microseconds(us) {
  if (missing(us)) return "";
  if (us < 999.5) return `${us < 10 ? us.toFixed(1) : Math.round(us)} µs`;
  if (us < 999_500) return `${us < 99_950 ? (us / 1e3).toFixed(1) : Math.round(us / 1e3)} ms`;
  return seconds(us / 1e6);
}

export function seconds(value) {
  if (missing(value)) return "";
  if (value < 1) return microseconds(value * 1e6);
  if (value < 99.5) return `${value.toFixed(1)} s`;
  if (value < 5970) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`.replace(/ 0 s$/, "");
  if (value < 172_800) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${(value / 86_400).toFixed(1)} days`;
}

/** A time of the coordinator's clock, such as 0:12 or 1:02:03. */
export function clock(at) {
  if (missing(at)) return "";
  const whole = Math.floor(at);
  const two = (part) => String(part).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function percent(share) {
  return missing(share) ? "" : `${Math.round(100 * share)} %`;
}

export function counted(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
