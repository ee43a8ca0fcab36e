"""Names from the published pages of neighbouring projects: flags, fields, headers, metrics, paths, and defaults.

Each name is from the project's own page; ``test_neighbours`` looks for it in ``docs/neighbours``. A default follows
``=``, and ``~`` stands for a space.
"""

from __future__ import annotations

NAMES = {
    "mooncake-conductor": """
        POST~/register POST~/unregister POST~/query POST~/query_by_hash
        endpoint replay_endpoint type modelname lora_name tenant_id=`default` instance_id block_size dp_rank
        additionalsalt=empty model token_ids lora_id cache_salt seq_hashes block_hash removed_instances
        longest_matched GPU CPU DISK DP
        event_id event_type stored removed cleared timestamp model_name additional_salt backend_id medium
        base_block_idx parent_hash gpu cpu disk vLLM SGLang Mooncake
    """,
    "dynamo": """
        --block-size=none --port=8090 --threads=4 --workers=none --model-name=default --tenant-id=default --peers=none
        DYN_ROUTER_MIN_INITIAL_WORKERS=0 --serve-indexer --use-remote-indexer kv-indexer kv-indexer-metrics
        GET~/health GET~/metrics POST~/register POST~/unregister GET~/workers POST~/query POST~/query_by_hash GET~/dump
        POST~/register_peer POST~/deregister_peer GET~/peers
        instance_id endpoint model_name block_size tenant_id=`default` dp_rank=0 replay_endpoint additional_salt
        source status endpoints listeners last_error pending active paused failed
        token_ids lora_name cache_salt block_hashes scores frequencies instances longest_matched gpu dp cpu disk
        data_parallel_rank last_seq
        dynamo_kvindexer_request_duration_seconds dynamo_kvindexer_requests_total dynamo_kvindexer_errors_total
        dynamo_kvindexer_models dynamo_kvindexer_workers dynamo_kvindexer_listeners
    """,
    "continuum": """
        prefix_routing enabled max_prefix_length=1024 load_factor_epsilon=0.25 virtual_nodes=150
        anthropic_cache_control_injection=false
        backend=memory capacity=1000 ttl=5m max_response_size=1~MiB max_stream_buffer_size=10~MiB
        url pool_size=8 key_prefix=`cr:resp:` connect_timeout_ms=3000 command_timeout_ms=1000
        fallback_capacity=1000 fallback_ttl_seconds=300 fallback_to_memory=true
        kv_cache_index max_entries=100000 entry_ttl_seconds=600 overlap_weight=0.6 load_weight=0.3 health_weight=0.1
        min_overlap_threshold=0.3 gpu_tier_weight=1.0 storage_tier_weight=0.6 storage_offloading enabled=false
        treat_eviction_as_offload=true event_sources backend_name endpoint reconnect_interval_ms
        MAX_SSE_BUFFER_SIZE=1~MiB
        cache_created cache_evicted cache_offloaded cache_reloaded cache_purged prefix_hash token_count
        X-Cache HIT MISS BYPASS
        GET~/admin/prefix-routing/stats GET~/admin/response-cache/stats POST~/admin/response-cache/invalidate
        GET~/admin/kv-index/stats GET~/admin/kv-index/backends POST~/admin/kv-index/clear
        routing_decisions overflow_rate backend_distribution in_flight_requests unique_prefixes clear_all
        cleared_entries prefix_count entry_count total_hits total_evictions event_sources_count events_received
        events_dropped last_event_at reconnect_count query_latency_count overlap_score_count index_created
        index_evicted entries_before_clear
        continuum_prefix_routing_requests_total strategy overflow fallback
        continuum_prefix_routing_backend_distribution continuum_prefix_routing_prefix_cardinality
        continuum_response_cache_requests_total continuum_response_cache_entries
        continuum_response_cache_size_bytes continuum_response_cache_evictions_total continuum_response_cache_hit_rate
        continuum_cache_backend_type continuum_cache_redis_connections_active continuum_cache_redis_connections_idle
        continuum_cache_redis_latency_seconds continuum_cache_redis_errors_total continuum_cache_fallback_active
        continuum_kv_event_received_total continuum_kv_event_processed_total continuum_kv_event_dropped_total
        continuum_kv_consumer_connected continuum_kv_consumer_reconnects_total continuum_kv_index_entries
        continuum_kv_index_events_total continuum_kv_index_query_latency_seconds
        continuum_kv_index_routing_decisions_total continuum_kv_index_overlap_score
        continuum_kv_index_event_source_status
    """,
    "llm-d-and-heimdall": """
        EndpointPickerConfig schedulingProfiles pluginRef featureGates prepareDataPlugins dataLayer data
        single-profile-handler disagg-profile-handler profiles decode=decode prefill=prefill encode=encode deciders
        decodeProfile prefillProfile encodeProfile prefillDeciderPluginName encodeDeciderPluginName
        deciderPluginName=prefix-based-pd-decider pd-profile-handler prefixPluginType=prefix-cache-scorer
        prefixPluginName primaryPort=0
        prefix-based-pd-decider nonCachedTokens=0 always-disagg-pd-decider always-disagg-multimodal-decider
        by-label label validValues allowsNoLabel=false by-label-selector matchLabels matchExpressions
        prefill-filter decode-filter encode-filter context-length-aware enableFiltering=false
        label=mif.moreh.io/context-length-range mif.moreh.io/role
        active-request-scorer requestTimeout=2m idleThreshold=0 maxBusyScore=1.0 load-aware-scorer threshold=128
        no-hit-lru-scorer lruSize=1024 precise-prefix-cache-scorer tokenProcessorConfig indexerConfig kvEventsConfig
        speculativeIndexing=false speculativeTTL=2s blockSize=16 kvBlockIndexConfig tokenizersPoolConfig
        inMemoryConfig redisConfig valkeyConfig costAwareMemoryConfig enableMetrics=false metricsLoggingInterval=0s
        size=1e8;~2GiB podCacheSize=10 address=redis://127.0.0.1:6379 backendType=redis enableRDMA=false
        modelName workersCount=5 hf local uds enabled=true huggingFaceToken tokenizersCacheDir=bin tokenizer
        tokenizerMode=auto tokenizerRevision autoDiscoveryDir=/mnt/models
        autoDiscoveryTokenizerFileName=tokenizer.json modelTokenizerMap
        socketFile=/tmp/tokenizer/tokenizer-uds.socket useTCP=false
        zmqEndpoint topicFilter=kv@ concurrency=4 discoverPods=true podDiscoveryConfig podNamespace socketPort=5557
        prefix-cache-scorer autoTune=true blockSizeTokens=16 blockSize=0 maxPrefixBlocksToMatch=256
        lruCapacityPerServer=31250 session-affinity-scorer x-session-token kv-cache-utilization-scorer
        lora-affinity-scorer queue-scorer running-requests-size-scorer predicted-latency-scorer
        max-score-picker random-picker weighted-random-picker maxNumOfEndpoints=1
        disagg-headers-handler mif-prefill-endpoint mif-encode-endpoints prefill-header-handler udsTokenizerConfig
        response-header-handler x-decoder-host-port x-prefiller-host-port --response-header
        models-data-source scheme=http path=/v1/models insecureSkipVerify=true model-server-protocol-models
        responses-store storeConfig tieredConfig ttl=24h maxEntries=10000 maxEntryBytes=1~MiB redis addresses masterName
        username password db=0 mongo uri database=heimdall collection=responses ttl=720h timeout=500ms stream
        key=heimdall:responses:mongo_sync consumerGroup=mongo-sync maxLen=1000000 batchSize=100 blockTimeout=1s
        claimAge=30s
    """,
    "sglang-hicache": """
        --shared-cache-type=none DYN_SHARED_CACHE_TYPE=none --shared-cache-multiplier=0.0
        DYN_SHARED_CACHE_MULTIPLIER=0.0 RouterConfigOverride.shared_cache_multiplier overlap_weight=1.0
        sglang_hicache_mooncake router_shared_cache_hit_rate router_shared_cache_beyond_blocks hits_beyond
        --page-size --enable-hierarchical-cache --hicache-ratio --hicache-write-policy --hicache-mem-layout
        --hicache-storage-backend --hicache-storage-backend-extra-config master_server_address
        --router-mode --http-port=8000 --log-level medium=GPU medium=CPU CPU_PINNED EXTERNAL
    """,
}
