"""From a trace to figures: pure arithmetic over its tables, repeatable on any machine, at any later time."""
