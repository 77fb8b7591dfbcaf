"""The commands of ``tessera``, each loaded only when it is called."""
