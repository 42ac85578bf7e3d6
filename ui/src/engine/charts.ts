// Draws the timeline of steps, and figures over time.

import { milliseconds, short } from "../format";
import { prepare, themed } from "./palette";
import type { TimedStep } from "./history";

const COLUMN = 4; // pixels of a step, with its gap
const TOKENS_HEIGHT = 92;
const TIME_HEIGHT = 54;
const LABELS = 54; // pixels for the scale on the left
const IDLE = 500; // milliseconds between two steps that are drawn as a break

export interface Timeline {
  first: number; // index in `steps` of the first column
  x0: number;
  column: number;
}

/** One column per step: tokens by kind above, milliseconds below. */
export function drawTimeline(canvas: HTMLCanvasElement, steps: TimedStep[], budget: number, width: number): Timeline {
  const height = TOKENS_HEIGHT + TIME_HEIGHT + 22;
  const context = prepare(canvas, width, height);
  const columns = Math.floor((width - LABELS) / COLUMN);
  const first = Math.max(0, steps.length - columns);
  const shown = steps.slice(first);
  const mostTokens = Math.max(8, ...shown.map((step) => step.decodes + step.prompt_tokens + (step.drafts ?? 0)));
  const mostMs = Math.max(1, ...shown.map((step) => step.seconds * 1000));
  const bottom = TOKENS_HEIGHT + 14;
  context.font = `10px ${themed("--sans")}`;
  axis(context, 14, TOKENS_HEIGHT, width, `${short(mostTokens)}`, "tokens");
  axis(context, bottom + 8, TIME_HEIGHT, width, milliseconds(mostMs), "time");
  const budgetY = 14 + TOKENS_HEIGHT * (1 - budget / mostTokens);
  if (budget <= mostTokens) line(context, LABELS, budgetY, width, themed("--faint"), [3, 3]);
  shown.forEach((step, i) => {
    const x = LABELS + i * COLUMN;
    const prompt = (TOKENS_HEIGHT * step.prompt_tokens) / mostTokens;
    const decode = (TOKENS_HEIGHT * step.decodes) / mostTokens;
    bar(context, x, 14 + TOKENS_HEIGHT, decode, themed("--decode"));
    bar(context, x, 14 + TOKENS_HEIGHT - decode, prompt, themed("--prefill"));
    const drafts = (TOKENS_HEIGHT * (step.drafts ?? 0)) / mostTokens; // a step with drafts has no prompt tokens
    bar(context, x, 14 + TOKENS_HEIGHT - decode, drafts, themed("--accent"));
    const time = (TIME_HEIGHT * step.seconds * 1000) / mostMs;
    bar(context, x, bottom + 8 + TIME_HEIGHT, time, themed(step.prompt_tokens ? "--prefill" : "--decode"));
    const before = shown[i - 1];
    if (before && step.ended - step.seconds * 1000 - before.ended > IDLE) {
      line(context, x - 0.5, 14, x - 0.5, themed("--faint"), [2, 2], height - 14);
    }
  });
  return { first, x0: LABELS, column: COLUMN };
}

function bar(context: CanvasRenderingContext2D, x: number, bottom: number, height: number, colour: string): void {
  if (height <= 0) return;
  context.fillStyle = colour;
  context.fillRect(x, bottom - Math.max(height, 1), COLUMN - 1, Math.max(height, 1));
}

function axis(context: CanvasRenderingContext2D, top: number, height: number, width: number, most: string, name: string): void {
  line(context, LABELS, top + height + 0.5, width, themed("--line"), []);
  context.fillStyle = themed("--muted");
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText(most, LABELS - 6, top);
  context.textBaseline = "bottom";
  context.fillText(name, LABELS - 6, top + height);
}

function line(
  context: CanvasRenderingContext2D, x: number, y: number, toX: number, colour: string, dash: number[], toY = y,
): void {
  context.save();
  context.strokeStyle = colour;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
  context.restore();
}

/** A small chart without axes: newest value at the right. most: value at the top; null: the largest one. */
export function drawSpark(canvas: HTMLCanvasElement, values: number[], colour: string, most: number | null, room: number): void {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width) return;
  const context = prepare(canvas, width, height);
  const top = Math.max(most ?? Math.max(...values), 1e-9);
  const step = width / (room - 1);
  const left = width - (values.length - 1) * step;
  context.beginPath();
  values.forEach((value, i) => context.lineTo(left + i * step, height - 1 - (height - 2) * Math.min(value / top, 1)));
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(left, height);
  context.globalAlpha = 0.14;
  context.fillStyle = colour;
  context.fill();
}
