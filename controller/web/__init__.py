"""The controller's web page (docs/web.md): what it shows, who may see it, and its server."""
