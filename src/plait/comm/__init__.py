"""The only room that communicates: process groups, typed collectives, the ledger of bytes."""
