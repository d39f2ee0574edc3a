"""The look of a report: one column, the reader's own fonts, light or dark as the reader's system is."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy: nothing is loaded, no script runs. matplotlib's SVGs carry styles of their own, and the
norm map is an image inside its SVG."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2026; --soft: #5c6470; --line: #d9dde3; --panel: #f5f6f8;
  --good: #11734f; --warn: #8a6100; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181d; --ink: #e4e7ec; --soft: #9aa3b0; --line: #343a44;
  --panel: #1d2128; --good: #4cc38a; --warn: #e0b040; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .7rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; }
.soft, figcaption { color: var(--soft); }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.good, .warn, .bad { font-weight: 600; }
nav a { color: inherit; margin-right: 1rem; white-space: nowrap; }
nav { margin-top: .8rem; font-size: .9rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); }
table.facts th { width: 10.5rem; }
table.numbers td + td, table.numbers th + th { text-align: right; font-variant-numeric: tabular-nums; }
table.list td:not(:last-child), table.list th { white-space: nowrap; max-width: 14rem; overflow: hidden;
  text-overflow: ellipsis; }
table.list td:last-child { width: 100%; }
pre, code { font: .84rem/1.45 ui-monospace, monospace; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem;
  margin: .5rem 0; overflow: auto; max-height: 32rem; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 38rem; height: auto; color: var(--ink); }
figure svg text { font-family: system-ui, sans-serif !important; }
figcaption { font-size: .9rem; margin-top: .25rem; }
details { margin: .4rem 0; } summary { cursor: pointer; }
.problem { border-left: 3px solid var(--bad); padding-left: .9rem; margin: 1rem 0; }
@media print { body { max-width: none; } pre { max-height: none; } }
"""
