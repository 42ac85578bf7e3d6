// The live view of the engine: figures, KV pool, rows of the batch, queue, and steps.

import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { ApiError } from "../api";
import { count, milliseconds, percent, short } from "../format";
import type { Theme } from "../theme";
import { blockFacts, drawBlocks, type Grid, mapped } from "./block_map";
import { drawSpark, drawTimeline, type Timeline } from "./charts";
import type { History, Sample } from "./history";
import { Palette, themed } from "./palette";
import { useSnapshots } from "./poll";
import { Requests } from "./requests";
import type { Snapshot } from "./snapshot";

interface Props {
  shown: boolean;
  adminKey: string;
  theme: Theme;
  openKeys: () => void;
}

/** One engine, and a choice if the server has several (--data-parallel-size). */
export function EngineView(props: Props) {
  const [engine, setEngine] = useState(0);
  const [engines, setEngines] = useState(1);
  return (
    <>
      {engines > 1 && (
        <p>
          <label>
            Engine{" "}
            <select value={String(engine)} onChange={(event) => setEngine(Number(event.currentTarget.value))}>
              {Array.from({ length: engines }, (_, index) => <option key={index} value={String(index)}>{index}</option>)}
            </select>{" "}
            of {engines}
          </label>
        </p>
      )}
      <OneEngine key={engine} {...props} engine={engine} setEngines={setEngines} />
    </>
  );
}

interface OneProps extends Props {
  engine: number;
  setEngines: (engines: number) => void;
}

function OneEngine({ shown, adminKey, theme, openKeys, engine, setEngines }: OneProps) {
  const { snapshot, history, problem } = useSnapshots(shown, adminKey, engine);
  useEffect(() => { if (snapshot) setEngines(snapshot.num_engines ?? 1); }, [snapshot]);
  const [palette] = useState(() => new Palette());
  const [highlighted, setHighlighted] = useState<string | null>(null);
  useMemo(() => snapshot && palette.keep(new Set([...snapshot.running, ...snapshot.waiting].map((one) => one.request_id))), [snapshot]);
  if (problem && (problem.status === 401 || problem.status === 404 || !snapshot)) {
    return <Closed problem={problem} given={!!adminKey} openKeys={openKeys} />;
  }
  if (!snapshot) return <p class="closed">Waiting for the engine.</p>;
  const drawn = { snapshot, theme, palette, highlighted, shown };
  return (
    <div class={problem ? "engine stale" : "engine"}>
      {problem && <p class="refusal" role="alert">{problem.message} The figures are of the last answer.</p>}
      <Figures snapshot={snapshot} history={history} theme={theme} />
      {snapshot.weight_version ? <p class="weights">Weights: version {snapshot.weight_version}</p> : null}
      <div class="columns">
        <BlockMap {...drawn} highlight={setHighlighted} />
        <Requests {...drawn} highlight={setHighlighted} />
      </div>
      <Steps snapshot={snapshot} history={history} theme={theme} shown={shown} />
    </div>
  );
}

function Closed({ problem, given, openKeys }: { problem: ApiError; given: boolean; openKeys: () => void }) {
  const missing = problem.status === 404;
  const refused = problem.status === 401;
  return (
    <div class="closed">
      <h2>{missing || refused ? "The engine's state needs an admin key" : "The engine cannot be read"}</h2>
      <p>
        {missing
          ? "This server was started without one. Start it with --admin-key KEY to see blocks, batch and steps here."
          : refused
            ? given
              ? "The server does not accept this admin key, or was started without one."
              : "Enter the key that the server was started with (--admin-key KEY)."
            : problem.message}
      </p>
      {refused && <button onClick={() => { openKeys(); requestAnimationFrame(() => document.getElementById("admin-key")?.focus()); }}>Enter key</button>}
    </div>
  );
}

// -- figures ---------------------------------------------------------------------------------------------------------

function Figures({ snapshot, history, theme }: { snapshot: Snapshot; history: History; theme: Theme }) {
  const { pool, stats } = snapshot;
  const { samples } = history;
  const last = samples.at(-1);
  const step = history.medianStep();
  const of = (value: (sample: Sample) => number) => samples.map(value);
  const chart = { samples: samples.length, theme };
  const { speculation } = stats;
  return (
    <dl class={speculation ? "figures drafting" : "figures"}>
      <Figure name="output" value={last ? short(last.outputRate) : "–"} unit="tok/s" line={of((s) => s.outputRate)} colour="--decode" {...chart} />
      <Figure name="prompts computed" value={last ? short(last.promptRate) : "–"} unit="tok/s" line={of((s) => s.promptRate)} colour="--prefill" {...chart} />
      <Figure name="KV used" value={percent(pool.used_blocks / pool.num_blocks)} unit={`of ${count(pool.num_blocks)} blocks`} line={of((s) => s.kvShare)} most={1} colour="--accent" {...chart} />
      <Figure name="running" value={count(snapshot.running.length)} unit={`of ${count(snapshot.max_num_seqs)} rows`} line={of((s) => s.running)} most={snapshot.max_num_seqs} colour="--accent" {...chart} />
      <Figure name="waiting" value={count(snapshot.waiting.length)} unit={stats.preemptions ? `${count(stats.preemptions)} preemptions` : "requests"} line={of((s) => s.waiting)} colour="--warn" {...chart} />
      <Figure name="step" value={step === null ? "–" : milliseconds(step).split("\u2009")[0]!} unit="ms, median" line={history.steps.slice(-120).map((s) => s.seconds)} colour="--muted" {...chart} />
      <Figure name="prefix hits" value={stats.prompt_tokens ? percent(stats.prefix_hit_tokens / stats.prompt_tokens) : "–"} unit="of prompt tokens" colour="--muted" {...chart} />
      {speculation && (
        <>
          <Figure name="drafts accepted" value={speculation.draft_tokens ? percent(last?.acceptance ?? speculation.accepted_tokens / speculation.draft_tokens) : "–"} unit={`${count(speculation.accepted_tokens)} tokens`} line={of((s) => s.acceptance)} most={1} colour="--decode" {...chart} />
          <Figure name="drafts per row" value={speculation.drafts_per_row.toFixed(1)} unit={`of at most ${speculation.num_speculative_tokens}`} line={of((s) => s.draftsPerRow)} most={speculation.num_speculative_tokens} colour="--accent" {...chart} />
        </>
      )}
    </dl>
  );
}

interface FigureProps {
  name: string;
  value: string;
  unit: string;
  line?: number[];
  most?: number;
  colour: string;
  theme: Theme;
}

function Figure({ name, value, unit, line, most, colour, theme }: FigureProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    if (canvas.current && line && line.length > 1) drawSpark(canvas.current, line, themed(colour), most ?? null, Math.max(line.length, 40));
  }, [line, theme]);
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        <b>{value}</b> <span>{unit}</span>
      </dd>
      {line ? <canvas ref={canvas} aria-hidden="true" /> : null}
    </div>
  );
}

// -- canvases --------------------------------------------------------------------------------------------------------

/** Width of an element, followed as it changes. */
function useWidth(): [RefObject<HTMLDivElement | null>, number] {
  const element = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry!.contentRect.width)));
    observer.observe(element.current!);
    return () => observer.disconnect();
  }, []);
  return [element, width];
}

interface Tip {
  x: number;
  y: number;
  lines: string[];
}

function Tooltip({ tip }: { tip: Tip | null }) {
  if (!tip) return null;
  return (
    <div class="tip" style={{ left: `${Math.min(tip.x + 14, innerWidth - 230)}px`, top: `${tip.y + 14}px` }}>
      {tip.lines.map((text, i) => <p key={i}>{text}</p>)}
    </div>
  );
}

interface MapProps {
  snapshot: Snapshot;
  theme: Theme;
  palette: Palette;
  highlighted: string | null;
  highlight: (requestId: string | null) => void;
  shown: boolean;
}

function BlockMap({ snapshot, theme, palette, highlighted, highlight, shown }: MapProps) {
  const [box, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const grid = useRef<Grid | null>(null);
  const [tip, setTip] = useState<Tip | null>(null);
  const [all, setAll] = useState(false);
  const blocks = useMemo(() => mapped(snapshot.blocks, all), [snapshot, all]);
  useEffect(() => {
    if (width && shown) grid.current = drawBlocks(canvas.current!, snapshot, { blocks, width, theme, palette, highlighted });
  }, [blocks, width, theme, highlighted, shown]);
  const { pool } = snapshot;
  const saved = pool.references - pool.used_blocks;
  const point = (event: MouseEvent) => {
    const block = blocks[grid.current?.blockAt(event.offsetX, event.offsetY) ?? -1];
    setTip(block ? { x: event.clientX, y: event.clientY, lines: blockFacts(block, snapshot) } : null);
    highlight(block?.owners.length === 1 ? block.owners[0]!.request_id : null);
  };
  const leave = () => {
    setTip(null);
    highlight(null);
  };
  const summary =
    `${count(pool.used_blocks)} of ${count(pool.num_blocks)} blocks used, ${count(pool.shared_blocks)} shared, ` +
    `${count(pool.cached_blocks)} cached, ${count(pool.empty_blocks)} empty`;
  return (
    <section class="card map" aria-labelledby="map-title">
      <h2 id="map-title">
        KV pool <span>{count(pool.num_blocks)} blocks of {pool.block_size} tokens</span>
        {(all || blocks.length < snapshot.blocks.length) && (
          <button class="quiet" aria-pressed={all} onClick={() => setAll(!all)}>
            {all ? "Show those in use" : `${count(blocks.length)} shown: show all`}
          </button>
        )}
      </h2>
      <div ref={box}>
        <canvas ref={canvas} role="img" aria-label={summary} data-blocks={pool.used_blocks} onMouseMove={point} onMouseLeave={leave} />
      </div>
      <ul class="legend">
        <li><i class="k-used" /> used <b>{count(pool.used_blocks)}</b></li>
        <li><i class="k-shared" /> shared <b>{count(pool.shared_blocks)}</b>{saved > 0 && <>, saves <b>{count(saved)}</b></>}</li>
        <li><i class="k-hit" /> prefix hit</li>
        <li><i class="k-unfilled" /> slots without a token</li>
        <li><i class="k-cached" /> cached <b>{count(pool.cached_blocks)}</b></li>
        <li><i class="k-empty" /> empty <b>{count(pool.empty_blocks)}</b></li>
      </ul>
      <Tooltip tip={tip} />
    </section>
  );
}

function Steps({ snapshot, history, theme, shown }: { snapshot: Snapshot; history: History; theme: Theme; shown: boolean }) {
  const [box, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const timeline = useRef<Timeline | null>(null);
  const [tip, setTip] = useState<Tip | null>(null);
  const { steps } = history;
  useEffect(() => {
    if (width && shown) timeline.current = drawTimeline(canvas.current!, steps, snapshot.max_num_batched_tokens, width);
  }, [steps, width, theme, shown]);
  const point = (event: MouseEvent) => {
    const at = timeline.current;
    const step = at && steps[at.first + Math.floor((event.offsetX - at.x0) / at.column)];
    if (!step || event.offsetX < at.x0) return setTip(null);
    const lines = [
      `step ${count(step.index)}: ${milliseconds(step.seconds * 1000)}`,
      `${count(step.rows)} rows, ${count(step.decodes)} decodes`,
      `${count(step.prompt_tokens)} prompt tokens`,
    ];
    if (step.drafts) lines.push(`${count(step.drafts)} drafts`);
    setTip({ x: event.clientX, y: event.clientY, lines });
  };
  return (
    <section class="card steps" aria-labelledby="steps-title">
      <h2 id="steps-title">
        Steps <span>tokens that each step computes, and its time; budget {count(snapshot.max_num_batched_tokens)} tokens</span>
      </h2>
      <div ref={box}>
        <canvas ref={canvas} role="img" aria-label={`The last ${steps.length} steps`} onMouseMove={point} onMouseLeave={() => setTip(null)} />
      </div>
      <ul class="legend">
        <li><i class="k-decode" /> decode</li>
        <li><i class="k-prefill" /> prompt</li>
        {snapshot.stats.speculation && <li><i class="k-draft" /> drafts</li>}
      </ul>
      <Tooltip tip={tip} />
    </section>
  );
}
