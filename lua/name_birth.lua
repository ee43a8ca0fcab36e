-- name_birth(birth; word) -> {verdict, word}
--
-- The word by which a Redis is known: another word means another Redis, or one that came back empty.
--
-- KEYS  birth  string  a random word
-- ARGV  word   given to it where it has none
--
-- {'applied', word}  its word

redis.call('SETNX', KEYS[1], ARGV[1])
return {'applied', redis.call('GET', KEYS[1])}
