// Draws the KV pool: one cell per block, in its owner's colour.

import type { Theme } from "../theme";
import { type Palette, prepare, themed } from "./palette";
import type { Block, Snapshot } from "./snapshot";

const MAX_CELL = 34; // pixels, with the gap to the next cell
const MIN_CELL = 2;
const MAX_HEIGHT = 430; // unless cells would be smaller than MIN_CELL
const LARGE = 1024; // blocks: the map of a larger pool shows those that hold something
const FEW = 256; // blocks that such a map has at least

/** Places of the cells: whole pixels that fill the width. */
export class Grid {
  readonly cell: number;
  readonly columns: number;
  readonly height: number;

  constructor(numBlocks: number, width: number) {
    const heightOf = (columns: number) => (Math.ceil(numBlocks / columns) * width) / columns;
    let columns = 8; // a multiple of 8 makes positions easy to name
    while (width / columns > MAX_CELL) columns += 8;
    while (heightOf(columns) > MAX_HEIGHT && width / (columns + 8) >= MIN_CELL) columns += 8;
    this.columns = columns;
    this.cell = width / columns;
    this.height = Math.ceil(heightOf(columns));
  }

  /** Left, top, width and height of a block's cell, without the gap. */
  place(index: number): [number, number, number, number] {
    const column = index % this.columns;
    const row = Math.floor(index / this.columns);
    const [left, right] = [Math.round(column * this.cell), Math.round((column + 1) * this.cell)];
    const [top, bottom] = [Math.round(row * this.cell), Math.round((row + 1) * this.cell)];
    return [left, top, right - left - this.gap, bottom - top - this.gap];
  }

  private get gap(): number {
    return this.cell >= 12 ? 2 : this.cell >= 5 ? 1 : 0;
  }

  blockAt(x: number, y: number): number {
    const column = Math.floor(x / this.cell);
    return column < this.columns ? Math.floor(y / this.cell) * this.columns + column : -1;
  }
}

const holds = (block: Block): boolean => block.ref_count > 0 || block.prefix_hash !== null;

/** The blocks of the map. Of a large pool that is mostly empty: used and cached ones, and the first empty ones. */
export function mapped(blocks: Block[], all: boolean): Block[] {
  const full = blocks.filter(holds).length;
  if (all || blocks.length <= LARGE || full > blocks.length / 2) return blocks;
  let spare = Math.max(FEW, Math.ceil(full / 64) * 64) - full;
  return blocks.filter((block) => holds(block) || spare-- > 0);
}

interface Options {
  blocks: Block[]; // of the map
  width: number;
  theme: Theme;
  palette: Palette;
  highlighted: string | null; // request id
}

/** Blocks that a request found in the prefix index: `request#sample/block`. */
function hits(snapshot: Snapshot): Set<string> {
  const found = new Map<string, number>();
  for (const { request_id, sample, cached_tokens } of snapshot.running) found.set(`${request_id}#${sample}`, cached_tokens);
  const keys = new Set<string>();
  for (const { block, owners } of snapshot.blocks) {
    for (const { request_id, sample, index } of owners) {
      const cached = found.get(`${request_id}#${sample}`) ?? 0;
      if ((index + 1) * snapshot.pool.block_size <= cached) keys.add(`${request_id}#${sample}/${block}`);
    }
  }
  return keys;
}

export function drawBlocks(canvas: HTMLCanvasElement, snapshot: Snapshot, options: Options): Grid {
  const { blocks, width, theme, palette, highlighted } = options;
  const grid = new Grid(blocks.length, width);
  const context = prepare(canvas, width, grid.height);
  const cached = themed("--cached");
  const empty = themed("--empty");
  const paper = themed("--paper");
  const found = hits(snapshot);
  for (const [index, block] of blocks.entries()) {
    const [x, y, side, high] = grid.place(index);
    const mine = highlighted === null || block.owners.some((owner) => owner.request_id === highlighted);
    context.globalAlpha = mine ? 1 : 0.18;
    if (!block.ref_count) {
      context.fillStyle = block.prefix_hash ? cached : empty;
      context.fillRect(x, y, side, high);
      if (side >= 6 && !block.prefix_hash) {
        context.fillStyle = paper;
        context.fillRect(x + 1, y + 1, side - 2, high - 2);
      }
      continue;
    }
    const colours = [...new Set(block.owners.map((owner) => palette.colour(owner.request_id, theme, owner.sample)))];
    fillStriped(context, x, y, side, high, colours);
    const unfilled = side * (1 - block.tokens / snapshot.pool.block_size);
    if (unfilled > 0.5) {
      context.globalAlpha *= 0.72;
      context.fillStyle = paper;
      context.fillRect(x + side - unfilled, y, unfilled, high);
    }
    if (!mine) continue;
    context.globalAlpha = 1;
    const hit = block.owners.some((owner) => found.has(`${owner.request_id}#${owner.sample}/${block.block}`));
    if (hit && side >= 7) {
      const size = Math.max(3, side * 0.34);
      context.fillStyle = themed("--ink");
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + size, y);
      context.lineTo(x, y + size);
      context.fill();
    }
    if (block.ref_count > 1 && side >= 13) writeCount(context, block, x, y, side);
  }
  context.globalAlpha = 1;
  return grid;
}

function fillStriped(
  context: CanvasRenderingContext2D, x: number, y: number, side: number, high: number, colours: string[],
): void {
  context.fillStyle = colours[0]!;
  context.fillRect(x, y, side, high);
  if (colours.length < 2 || side < 3) return;
  context.save();
  context.beginPath();
  context.rect(x, y, side, high);
  context.clip();
  // At least twice around the colours, so that each of them is seen.
  const stripe = Math.max(1.5, (2 * side) / Math.max(colours.length, 4) / (colours.length > 4 ? 1 : 1.5));
  for (let i = 0, at = 0; at < 2 * side; i++, at += stripe) {
    context.fillStyle = colours[i % colours.length]!;
    context.beginPath();
    context.moveTo(x + at, y);
    context.lineTo(x + at + stripe, y);
    context.lineTo(x + at + stripe - 2 * side, y + 2 * side);
    context.lineTo(x + at - 2 * side, y + 2 * side);
    context.fill();
  }
  context.restore();
}

function writeCount(context: CanvasRenderingContext2D, block: Block, x: number, y: number, side: number): void {
  context.font = `700 ${Math.round(side * 0.55)}px ui-monospace, monospace`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeStyle = themed("--paper");
  context.fillStyle = themed("--ink");
  const text = String(block.ref_count);
  context.strokeText(text, x + side / 2, y + side / 2 + 1);
  context.fillText(text, x + side / 2, y + side / 2 + 1);
}

/** The facts of one block, as the lines of its tooltip. */
export function blockFacts(block: Block, snapshot: Snapshot): string[] {
  const lines = [`block ${block.block}: ${block.tokens} of ${snapshot.pool.block_size} slots`];
  if (!block.ref_count) lines[0] = `block ${block.block}: ${block.prefix_hash ? "cached, free" : "empty"}`;
  if (block.ref_count > 1) lines.push(`shared by ${block.ref_count} block tables`);
  for (const owner of block.owners.slice(0, 6)) {
    const sample = owner.sample ? ` sample ${owner.sample}` : "";
    lines.push(`${shortId(owner.request_id)}${sample}, entry ${owner.index}`);
  }
  if (block.owners.length > 6) lines.push(`and ${block.owners.length - 6} more`);
  if (block.prefix_hash) lines.push(`prefix ${block.prefix_hash.slice(0, 12)}…`);
  if (block.last_use !== null && !block.ref_count) lines.push(`last used in step ${block.last_use}`);
  return lines;
}

/** The kind and the end of an id: ids of one route have the same beginning. */
export function shortId(requestId: string): string {
  return requestId.length <= 14 ? requestId : `${requestId.split("-")[0]!.slice(0, 8)}…${requestId.slice(-6)}`;
}
