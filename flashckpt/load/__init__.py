"""load: inventory → choose → cover → plan → read. Every decision is a pure function of what was gathered."""
