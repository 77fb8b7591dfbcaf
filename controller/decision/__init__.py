"""The stages of a decision, in their order: read, choose, withdraw, admit, write, explain."""
