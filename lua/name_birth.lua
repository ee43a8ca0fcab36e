-- name_birth(incarnation; nonce) -> {verdict, nonce}
--
-- Return the nonce of this Redis's incarnation. Another nonce later means another Redis, or one that came back empty.
--
-- KEYS  incarnation  string  a random nonce
-- ARGV  nonce        the value, if the key does not exist
--
-- {'applied', nonce}  the value of the key

redis.call('SETNX', KEYS[1], ARGV[1])
return {'applied', redis.call('GET', KEYS[1])}
