-- forget_dead(dead; holder) -> {verdict, was_there}
--
-- Forget a dead holder, which has been swept on every shard, so that no block names it.
--
-- KEYS  dead    set  holder ids still to be swept
-- ARGV  holder  its id
--
-- {'applied', was_there}  1, or 0 if another worker has removed it before

return {'applied', redis.call('SREM', KEYS[1], ARGV[1])}
