"""The API of Dynamo: its indexer and its selector."""
