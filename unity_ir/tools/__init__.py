"""
The command-line tools: `unity-opt`, `unity-profile`, `unity-tune`, `unity-aot`, `unity-sweep` and `unity-rules`.

`start` has their entry points. `command_line` is shared by all; `opt_*` belong to
`unity-opt`; `library_rules` and `import_rules` are subcommands of `unity-rules`.
"""
