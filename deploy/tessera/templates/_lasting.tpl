{{- /*
Refuses upgrades that change the driver name or the state directory. Node plugins that differ in one of them do not share a
checkpoint: both would offer the same GPUs, including those of running pods. The lookup finds nothing in `helm template`.
*/ -}}
{{- define "tessera.lasting" -}}
{{- $values := dict "driverName" (list "--driver-name=" .Values.driverName) "nodePlugin.stateDir" (list "--state-dir=" (.Values.nodePlugin.stateDir | default "")) -}}
{{- with lookup "apps/v1" "DaemonSet" .Release.Namespace "tessera-node" -}}
  {{- $args := (index .spec.template.spec.containers 0).args -}}
  {{- range $value, $flag := $values -}}
    {{- $installed := "" -}}
    {{- $wanted := last $flag -}}
    {{- range $args -}}
      {{- if hasPrefix (first $flag) . -}}{{- $installed = trimPrefix (first $flag) . -}}{{- end -}}
    {{- end -}}
    {{- range $.Values.nodePlugin.extraArgs -}}
      {{- if hasPrefix (first $flag) . -}}{{- $wanted = trimPrefix (first $flag) . -}}{{- end -}}
    {{- end -}}
    {{- if ne $installed $wanted -}}
      {{- fail (printf "%s: %s is installed, and an upgrade cannot change it to %s: GPUs of running pods would be offered again; keep %s, or run helm uninstall first" $value (quote $installed) (quote $wanted) (quote $installed)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
