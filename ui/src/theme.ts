// Light or dark: the system's choice until the reader makes one. Nothing is stored.

import { useEffect, useState } from "preact/hooks";

export type Theme = "light" | "dark";

export function useTheme(): [Theme, () => void] {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [theme, setTheme] = useState<Theme>(system.matches ? "dark" : "light");
  useEffect(() => {
    const follow = () => setTheme(system.matches ? "dark" : "light");
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  document.documentElement.dataset.theme = theme;
  return [theme, () => setTheme(theme === "dark" ? "light" : "dark")];
}
