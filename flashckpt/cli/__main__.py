from __future__ import annotations

from flashckpt.cli import main

main()
