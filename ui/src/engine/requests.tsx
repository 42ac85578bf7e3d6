// The request table and the queue.

import { count, seconds } from "../format";
import type { Theme } from "../theme";
import { shortId } from "./block_map";
import type { Palette } from "./palette";
import type { EngineRequest, Snapshot } from "./snapshot";

const MAX_LISTED = 40;

interface Props {
  snapshot: Snapshot;
  theme: Theme;
  palette: Palette;
  highlighted: string | null;
  highlight: (requestId: string | null) => void;
}

export function Requests(props: Props) {
  const { snapshot } = props;
  const { running, waiting } = snapshot;
  const longest = Math.max(1, ...running.map(lengthOf));
  return (
    <section class="card batch" aria-labelledby="batch-title">
      <h2 id="batch-title">
        Batch <span>{count(running.length)} of {count(snapshot.max_num_seqs)} rows</span>
      </h2>
      <Rows {...props} />
      <table>
        <thead>
          <tr>
            <th scope="col">row</th>
            <th scope="col">request</th>
            <th scope="col" class="wide">prompt + output tokens</th>
            <th scope="col">blocks</th>
            <th scope="col">age</th>
          </tr>
        </thead>
        <tbody onMouseLeave={() => props.highlight(null)}>
          {running.slice(0, MAX_LISTED).map((request) => <Row key={keyOf(request)} request={request} longest={longest} {...props} />)}
        </tbody>
      </table>
      {running.length > MAX_LISTED && <p class="note">and {count(running.length - MAX_LISTED)} more</p>}
      {!running.length && <p class="note">No request runs.</p>}
      <h2>
        Queue <span>{waiting.length ? `${count(waiting.length)} waiting, next first` : "empty"}</span>
      </h2>
      {waiting.length > 0 && (
        <ol class="queue">
          {waiting.slice(0, MAX_LISTED).map((request) => (
            <li key={keyOf(request)} title={request.adapter ? `${request.request_id}, LoRA adapter ${request.adapter}` : request.request_id}>
              <b>{count(request.prompt_tokens + request.output_tokens)}</b> {request.status === "preempted" ? "preempted" : seconds(request.age_seconds)}
            </li>
          ))}
          {waiting.length > MAX_LISTED && <li>and {count(waiting.length - MAX_LISTED)} more</li>}
        </ol>
      )}
    </section>
  );
}

const keyOf = ({ request_id, sample }: EngineRequest) => `${request_id}#${sample}`;
const lengthOf = ({ prompt_tokens, output_tokens }: EngineRequest) => prompt_tokens + output_tokens;

/** All rows of the request table, free ones too. */
function Rows({ snapshot, theme, palette, highlighted }: Props) {
  const byRow = new Map(snapshot.running.map((request) => [request.row, request]));
  return (
    <div class="rows" aria-hidden="true">
      {Array.from({ length: snapshot.max_num_seqs }, (_, row) => {
        const request = byRow.get(row);
        if (!request) return <i key={row} />;
        const dim = highlighted !== null && highlighted !== request.request_id;
        return <i key={row} class={dim ? `${request.status} dim` : request.status} style={{ "--own": palette.colour(request.request_id, theme, request.sample) }} />;
      })}
    </div>
  );
}

function Row({ request, longest, theme, palette, highlighted, highlight }: Props & { request: EngineRequest; longest: number }) {
  const { prompt_tokens, output_tokens, computed_tokens, cached_tokens } = request;
  const width = (tokens: number) => `${(100 * Math.max(tokens, 0)) / longest}%`;
  const computed = Math.min(computed_tokens, prompt_tokens);
  const sample = request.sample ? `.${request.sample}` : "";
  return (
    <tr
      class={highlighted === request.request_id ? "lit" : ""}
      style={{ "--own": palette.colour(request.request_id, theme, request.sample) }}
      onMouseEnter={() => highlight(request.request_id)}
    >
      <td>{request.row}</td>
      <th scope="row" title={request.request_id}>
        <i class="swatch" /> {shortId(request.request_id)}{sample}
        {request.preemptions > 0 && <em title={`preempted ${request.preemptions} times`}> ↺{request.preemptions}</em>}
        {request.adapter && <small title={`LoRA adapter ${request.adapter}`}> {request.adapter}</small>}
      </th>
      <td class="wide">
        <span class="progress" title={`${request.status}: ${count(cached_tokens)} cached, ${count(computed)} of ${count(prompt_tokens)} prompt tokens computed, ${count(output_tokens)} output tokens`}>
          <i class="hit" style={{ width: width(cached_tokens) }} />
          <i class="computed" style={{ width: width(computed - cached_tokens) }} />
          <i class="todo" style={{ width: width(prompt_tokens - computed) }} />
          <i class="output" style={{ width: width(output_tokens) }} />
        </span>
        <small>
          {count(prompt_tokens)} + {count(output_tokens)}
        </small>
      </td>
      <td>{count(request.num_blocks)}</td>
      <td>{seconds(request.age_seconds)}</td>
    </tr>
  );
}
