// Builds the page into serving/page, with a manifest that says which sources it was built from.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, type Plugin } from "vite";

const UI = import.meta.dirname;
const OUT = join(UI, "../serving/page");
const SOURCES = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"];

const sha256 = (data: string | Buffer) => createHash("sha256").update(data).digest("hex");

function filesBelow(folder: string): string[] {
  return readdirSync(join(UI, folder), { withFileTypes: true }).flatMap((entry) => {
    const path = `${folder}/${entry.name}`;
    return entry.isDirectory() ? filesBelow(path) : [path];
  });
}

// tests/serving/test_page.py computes the same hash, so a stale bundle is found without node.
function manifest(outDir: string): Plugin {
  return {
    name: "manifest",
    closeBundle() {
      const sources = [...SOURCES, ...filesBelow("src")].sort();
      const lines = sources.map((path) => `${sha256(readFileSync(join(UI, path)))}  ${path}\n`);
      const built = readdirSync(outDir).filter((name) => name !== "manifest.json").sort();
      const files = Object.fromEntries(built.map((name) => [name, sha256(readFileSync(join(outDir, name)))]));
      writeFileSync(join(outDir, "manifest.json"), JSON.stringify({ sources: sha256(lines.join("")), files }, null, 2) + "\n");
    },
  };
}

export default defineConfig(() => {
  const outDir = process.env.OUT_DIR ?? OUT;
  return {
    base: "./",
    publicDir: false as const,
    build: {
      outDir,
      emptyOutDir: true,
      license: { fileName: "licenses.md" }, // of the libraries in the bundle
      assetsDir: "",
      assetsInlineLimit: 0,
      modulePreload: false as const,
      target: "es2022",
      rolldownOptions: { output: { entryFileNames: "page-[hash].js", assetFileNames: "page-[hash][extname]" } },
    },
    plugins: [manifest(outDir)],
  };
});
