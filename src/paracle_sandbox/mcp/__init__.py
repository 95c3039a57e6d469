"""The MCP server: the tools of a sandbox for any client of the Model Context Protocol."""
