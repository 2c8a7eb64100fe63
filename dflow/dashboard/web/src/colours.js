// Colours that people with any colour vision tell apart (after Okabe and Ito), for lines, boxes and slices.

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d", "#4d4d4d"];
const DARK = ["#56a9e0", "#f0884a", "#2fc49a", "#e3a0c4", "#e6b422", "#8fd0f5", "#b98ac9", "#b4b4b4"];

export const darkMode = matchMedia("(prefers-color-scheme: dark)");

export function colour(index) {
  const palette = darkMode.matches ? DARK : LIGHT;
  return palette[index % palette.length];
}

/** Lines of the ninth and later series are dashed, as their colours repeat. */
export function dashes(index) {
  return [undefined, [6, 4], [2, 3], [10, 4, 2, 4]][Math.floor(index / LIGHT.length) % 4];
}

/** Gives each name an index: always the same for one name. */
export class Numbering {
  constructor() {
    this.known = new Map();
  }

  of(name) {
    if (!this.known.has(name)) this.known.set(name, this.known.size);
    return this.known.get(name);
  }
}
