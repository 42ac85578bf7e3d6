// Numbers as text, all in the same style.

const SPACE = "\u2009"; // thin, between number and unit

export const count = (value: number): string => Math.round(value).toLocaleString("en-US");

export function short(value: number): string {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

export const percent = (share: number, digits = 0): string => `${(share * 100).toFixed(digits)}${SPACE}%`;

export function probability(p: number): string {
  if (p >= 0.9995) return `100${SPACE}%`;
  return p >= 0.001 ? percent(p, 1) : `<0.1${SPACE}%`;
}

export function milliseconds(ms: number): string {
  if (ms >= 10_000) return seconds(ms / 1000);
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)}${SPACE}s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms.toFixed(1)}${SPACE}ms`;
}

export function seconds(value: number): string {
  if (value >= 3600) return `${(value / 3600).toFixed(1)}${SPACE}h`;
  if (value >= 60) return `${Math.floor(value / 60)}:${String(Math.floor(value % 60)).padStart(2, "0")}`;
  return `${value.toFixed(value < 10 ? 1 : 0)}${SPACE}s`;
}
