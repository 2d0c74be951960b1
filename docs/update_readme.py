"""Write the output and the program the README shows anew: `python docs/update_readme.py`. A test keeps it true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COMMAND = "unity-opt examples/mnist_mlp.pcg --search --machine=2gpu"


def unity_opt(*options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "unity-opt"), *COMMAND.split()[1:], *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def main() -> None:
    done = unity_opt("--stats")
    shown = f"```\n$ {COMMAND} --stats\n{stripped(done.stdout)}\n\n{stripped(done.stderr)}\n```\n"
    program = unity_opt("-t", "triton").stdout
    step = program[program.index("def forward_backward(") :]
    step = f"```python\n{stripped(step[: step.index(chr(10) * 3)])}\n```\n"
    text = README.read_text()
    text = re.sub(r"^```\n\$ unity-opt [^\n]* --stats\n.*?^```\n", lambda _: shown, text, flags=re.M | re.S)
    text = re.sub(r"^```python\ndef forward_backward.*?^```\n", lambda _: step, text, flags=re.M | re.S)
    README.write_text(text)


if __name__ == "__main__":
    main()
