// Calls to the server that has served this page. The page is at ROOT/ui/, below any prefix of a proxy.

const ROOT = new URL("../", document.baseURI);

/** An error that the server has described, or a failed connection (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

async function send(path: string, key: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response: Response;
  try {
    // No cookies, no cache, and no redirect that could carry the key elsewhere.
    response = await fetch(new URL(path, ROOT), { ...init, headers, credentials: "omit", cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await describe(response);
  return response;
}

async function describe(response: Response): Promise<ApiError> {
  const text = await response.text();
  try {
    const error = JSON.parse(text).error;
    return new ApiError(response.status, String(error.message), error.param ?? null);
  } catch {
    return new ApiError(response.status, `status ${response.status}: ${text.slice(0, 300) || response.statusText}`);
  }
}

/** GET a JSON document. */
export async function get<T>(path: string, key: string, signal?: AbortSignal): Promise<T> {
  return (await send(path, key, { signal })).json();
}

/** POST a JSON body and yield the objects of the event stream that answers. Aborting `signal` ends the request. */
export async function* stream<T>(path: string, body: unknown, key: string, signal: AbortSignal): AsyncGenerator<T> {
  const response = await send(path, key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop()!;
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new ApiError(500, String(data.error.message), data.error.param ?? null);
      yield data;
    }
  }
}

export interface ModelCard {
  id: string;
  max_model_len: number;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}
