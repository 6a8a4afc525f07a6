"""Keys, certificates and the audit log.

client_keys     the clients' key pairs: create, register, rotate, revoke; registered label sets
certificates    the certificate authority and the server's TLS certificate
private_keys    private key files and passphrases
audit_log       audit.jsonl: a log in which changes can be detected
"""
