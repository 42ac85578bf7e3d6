// Record of a tour's checks, as in checks.py. A tour script runs as `node tour_NAME.mjs RESULT_FILE`.

import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";

export const BASE = process.env.TOUR_BASE_URL; // server of the demo model, without /v1
export const EMBEDDING_BASE = process.env.TOUR_EMBEDDING_URL; // the same model with --runner pooling
export const MODEL = "demo";
export const PROMPT = "def read_json(path):";

const passed = [];
const failed = {};
const limits = {};

/** Record the function as passed, or as failed with the error that it threw. */
export async function check(name, work) {
  try {
    await work();
    passed.push(name);
  } catch (error) {
    failed[name] = `${error?.name}: ${error?.message}`.slice(0, 1500);
  }
}

/** Record a limit of the client. The function must throw an error that contains `says`. */
export async function limit(name, says, reason, work) {
  let thrown;
  try {
    await work();
  } catch (error) {
    thrown = error;
  }
  if (thrown === undefined) failed[name] = "no error: the client has lost this limit; make it a check";
  else if (`${thrown.message}`.includes(says)) limits[name] = reason;
  else failed[name] = `another error than '${says}': ${thrown.name}: ${thrown.message}`.slice(0, 1500);
}

/** Return when no request runs or waits on the server. Throws an error after 20 seconds. */
export async function waitUntilIdle() {
  for (let attempt = 0; attempt < 200; attempt++) {
    const load = await (await fetch(`${BASE}/load`)).json();
    if (load.server_load === 0) return;
    await new Promise((done) => setTimeout(done, 100));
  }
  assert.fail("requests still run after 20 s");
}

/** Write the result file that the command line names. */
export function write() {
  writeFileSync(process.argv[2], JSON.stringify({ passed, failed, limits }));
}
