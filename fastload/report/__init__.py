"""From a summary to something to read: formatting only, no figure is made here."""
