// Fetches snapshots while the view is shown.

import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "../api";
import { History } from "./history";
import type { Snapshot } from "./snapshot";

const INTERVAL = 700; // milliseconds between two snapshots of a small pool
const SHARE = 8; // a snapshot that takes t is followed by a pause of at least 8 t

export interface Polled {
  snapshot: Snapshot | null;
  history: History;
  problem: ApiError | null;
}

/** engine: its index; it must not change. shown: false pauses. The page also pauses while its browser tab is hidden. */
export function useSnapshots(shown: boolean, adminKey: string, engine: number): Polled {
  const [state, setState] = useState<Polled>(() => ({ snapshot: null, history: new History(), problem: null }));
  useEffect(() => {
    if (!shown) return;
    const leaving = new AbortController();
    let timer = 0;
    const poll = async () => {
      const began = performance.now();
      let pause = INTERVAL;
      if (!document.hidden) {
        try {
          const snapshot = await get<Snapshot>(engine ? `admin/inspect?engine=${engine}` : "admin/inspect", adminKey, leaving.signal);
          const now = performance.now();
          pause = Math.max(pause - (now - began), SHARE * (now - began));
          state.history.add(snapshot, now);
          setState(({ history }) => ({ snapshot, history, problem: null }));
        } catch (error) {
          if (leaving.signal.aborted) return;
          const problem = error instanceof ApiError ? error : new ApiError(0, String(error));
          setState((old) => ({ ...old, problem }));
          if (problem.status === 401 || problem.status === 404) return; // another key starts again
          pause = 3000;
        }
      }
      timer = window.setTimeout(poll, pause);
    };
    void poll();
    return () => {
      leaving.abort();
      clearTimeout(timer);
    };
  }, [shown, adminKey]);
  return state;
}
