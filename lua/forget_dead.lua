-- forget_dead(dead; holder) -> {verdict, 0}
--
-- A dead holder has been swept on every shard; nothing names it any more.
--
-- KEYS  dead    set  holder ids still to be swept
-- ARGV  holder  its id
--
-- {'applied', 0}

redis.call('SREM', KEYS[1], ARGV[1])
return {'applied', 0}
