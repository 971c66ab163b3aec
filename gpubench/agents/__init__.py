"""Offers the commands to coding agents as the tools of an MCP server."""
