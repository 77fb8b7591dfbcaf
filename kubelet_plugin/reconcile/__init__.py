"""Work on claims that no call of the kubelet starts: retries, orphans, recovery after a crash, uninstallation."""
