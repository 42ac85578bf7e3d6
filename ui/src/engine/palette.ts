// Colours of requests, and of the theme on a canvas.

import type { Theme } from "../theme";

const GOLDEN = 137.508; // degrees: keeps any number of hues apart

/** A request keeps its colour until it ends. New requests get the colours of ended ones, so that hues stay apart. */
export class Palette {
  private numbers = new Map<string, number>();

  /** Forget all requests but these. */
  keep(requestIds: Set<string>): void {
    for (const id of this.numbers.keys()) if (!requestIds.has(id)) this.numbers.delete(id);
  }

  colour(requestId: string, theme: Theme, sample = 0): string {
    let number = this.numbers.get(requestId);
    if (number === undefined) {
      const used = new Set(this.numbers.values());
      for (number = 0; used.has(number); number++);
      this.numbers.set(requestId, number);
    }
    const hue = (250 + number * GOLDEN) % 360;
    const odd = number % 2 ? 0.07 : 0;
    const light = (theme === "dark" ? 0.72 - odd : 0.64 - odd) + Math.min(sample * 0.05, 0.15);
    return `oklch(${light.toFixed(3)} 0.135 ${hue.toFixed(1)})`;
  }
}

/** The value of a custom property of the page. */
export const themed = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Size a canvas for the screen's pixels, clear it, and return its context in units of CSS pixels. */
export function prepare(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.scale(scale, scale);
  context.clearRect(0, 0, width, height);
  return context;
}
