// Markdown of an answer, made safe twice: the renderer writes no HTML of the model, and DOMPurify keeps a short list of
// tags and attributes. Nothing is loaded: an image becomes a link.

import DOMPurify from "dompurify";
import { Marked } from "marked";
import { useEffect, useRef } from "preact/hooks";

const MAX_CHARACTERS = 200_000; // above, an answer is shown as plain text

const escape = (text: string) =>
  text.replace(/[&<>"']/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[char]!);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">image: ${escape(text || href)}</a>`,
  },
});

const purifier = DOMPurify(window);
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("title", node.getAttribute("href") ?? "no address");
});

const RULES = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong",
    "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true as const,
};

function rendered(text: string): Node {
  if (text.length > MAX_CHARACTERS) return document.createTextNode(text);
  return purifier.sanitize(marked.parse(text, { async: false }), RULES);
}

/** Text as markdown. While the text grows, rendering takes at most a fifth of the time. */
export function Markdown({ text }: { text: string }) {
  const element = useRef<HTMLDivElement>(null);
  const pause = useRef({ until: 0, timer: 0 });
  useEffect(() => {
    const state = pause.current;
    const draw = () => {
      const began = performance.now();
      element.current?.replaceChildren(rendered(text));
      const ended = performance.now();
      state.until = ended + 4 * (ended - began);
    };
    clearTimeout(state.timer);
    const wait = state.until - performance.now();
    if (wait <= 0) draw();
    else state.timer = window.setTimeout(draw, wait);
  }, [text]);
  useEffect(() => () => clearTimeout(pause.current.timer), []);
  return <div class="markdown" ref={element} />;
}
