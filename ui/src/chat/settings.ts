// Settings of a request, and the request bodies that follow from them. An empty field is not sent.

export type Mode = "chat" | "completion";
export type StructureKind = "none" | "json_schema" | "json_object" | "regex" | "choice" | "grammar";

export interface Settings {
  mode: Mode;
  model: string;
  system: string;
  numbers: Record<string, string>;
  stop: string; // one string a line
  probabilities: boolean;
  structure: StructureKind;
  structures: Record<StructureKind, string>; // text of each editor
  tools: string;
  toolChoice: string;
}

export interface NumberField {
  name: string;
  label: string;
  min?: number;
  max?: number;
  step: number | "any";
  integer?: boolean;
  help: string;
}

export const NUMBER_FIELDS: NumberField[] = [
  { name: "temperature", label: "temperature", min: 0, step: 0.1, help: "0 is greedy" },
  { name: "top_p", label: "top_p", min: 0, max: 1, step: 0.05, help: "smallest set of tokens with this probability" },
  { name: "top_k", label: "top_k", min: -1, step: 1, integer: true, help: "the k most likely tokens; 0 is all" },
  { name: "min_p", label: "min_p", min: 0, max: 1, step: 0.05, help: "least probability, relative to the most likely token" },
  { name: "max_tokens", label: "max_tokens", min: 1, step: 1, integer: true, help: "most tokens of the answer" },
  { name: "seed", label: "seed", step: 1, integer: true, help: "the same seed gives the same answer" },
  { name: "presence_penalty", label: "presence", min: -2, max: 2, step: 0.1, help: "presence_penalty" },
  { name: "frequency_penalty", label: "frequency", min: -2, max: 2, step: 0.1, help: "frequency_penalty" },
  { name: "repetition_penalty", label: "repetition", min: 0, step: 0.05, help: "repetition_penalty; 1 is none" },
];

export const STRUCTURES: Record<StructureKind, { label: string; hint: string; example: string }> = {
  none: { label: "any text", hint: "", example: "" },
  json_schema: {
    label: "JSON schema",
    hint: "response_format.json_schema.schema",
    example: JSON.stringify(
      {
        type: "object",
        properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 120 } },
        required: ["name", "age"],
        additionalProperties: false,
      },
      null,
      2,
    ),
  },
  json_object: { label: "any JSON object", hint: "response_format.type", example: "" },
  regex: { label: "regular expression", hint: "structured_outputs.regex", example: "[0-9]{4}-[0-9]{2}-[0-9]{2}" },
  choice: { label: "choice, one a line", hint: "structured_outputs.choice", example: "yes\nno" },
  grammar: { label: "grammar, Lark or GBNF", hint: "structured_outputs.grammar", example: 'start: "yes" | "no"' },
};

export const newSettings = (): Settings => ({
  mode: "chat",
  model: "",
  system: "",
  numbers: {},
  stop: "",
  probabilities: true,
  structure: "none",
  structures: Object.fromEntries(Object.entries(STRUCTURES).map(([kind, { example }]) => [kind, example])) as Settings["structures"],
  tools: "",
  toolChoice: "auto",
});

/** A field of the form that cannot be sent. `param` is the name that the server would use. */
export class FieldError extends Error {
  constructor(
    readonly param: string,
    message: string,
  ) {
    super(message);
  }
}

function json(param: string, text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(param, `This is not JSON: ${(error as Error).message}`);
  }
}

function structure({ structure: kind, structures }: Settings): Record<string, unknown> {
  const text = structures[kind];
  switch (kind) {
    case "none":
      return {};
    case "json_object":
      return { response_format: { type: "json_object" } };
    case "json_schema": {
      const schema = json("response_format.json_schema.schema", text);
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
    }
    case "choice":
      return { structured_outputs: { choice: text.split("\n").filter((line) => line !== "") } };
    default:
      return { structured_outputs: { [kind]: text } };
  }
}

/** Fields that both routes take. Raises FieldError. */
function common(settings: Settings): Record<string, unknown> {
  const body: Record<string, unknown> = {};
  if (settings.model) body.model = settings.model;
  for (const { name, label, integer } of NUMBER_FIELDS) {
    const text = (settings.numbers[name] ?? "").trim();
    if (!text) continue;
    const value = Number(text);
    if (!Number.isFinite(value) || (integer && !Number.isSafeInteger(value))) {
      throw new FieldError(name, `${label} is not ${integer ? "an integer" : "a number"}: ${text}`);
    }
    body[name] = value;
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  // A line of the field cannot hold a line break: \n stands for one.
  if (stop.length) body.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  return { ...body, ...structure(settings), stream: true, stream_options: { include_usage: true } };
}

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

const TOP = 5; // alternatives of each token

/** Body of POST /v1/chat/completions. Raises FieldError. */
export function chatBody(settings: Settings, messages: Message[]): Record<string, unknown> {
  const body = common(settings);
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  if (settings.tools.trim()) Object.assign(body, { tools: json("tools", settings.tools), tool_choice: settings.toolChoice });
  const system: Message[] = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return { ...body, messages: [...system, ...messages] };
}

/** Body of POST /v1/completions. The route's own default of 16 tokens is too short to look at. Raises FieldError. */
export function completionBody(settings: Settings, prompt: string, defaultTokens: number): Record<string, unknown> {
  const body = { max_tokens: defaultTokens, ...common(settings) };
  return { ...body, ...(settings.probabilities ? { logprobs: TOP } : {}), prompt };
}

export const completionTokens = (maxModelLen: number): number => Math.min(256, Math.floor(maxModelLen / 2));
